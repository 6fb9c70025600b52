"""How episodes fail."""


class EpisodeFailed(RuntimeError):
    """An episode that ended for no fault of the policy. This attempt counts, and the sample is
    tried again."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        """What failed: "environment", "harness", "engine" or "deadline"."""


class Restarted(RuntimeError):
    """The host process of an episode ended because of another episode, or while this one called
    nothing in it. The episode starts again, and this counts as no attempt."""
