"""When the engines of makers are compared with the actor: between two steps of the first
trainer."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from verl_like.single_controller.failure import CallTimeout

LATE_S = 120.0
"""How long a step waits for a maker that was started again."""


class Comparisons:
    """Lets makers compare themselves with an actor as long as its weights are those of one version.

    The first step waits for all makers. A maker that comes when the weights have changed comes
    again with newer ones, and the next step waits for it.

    Args:
        name: of the trainer, for messages.
        makers: the names of those that are to come before the first step.
        limit_s: how long the first step waits, in seconds.
    """

    def __init__(self, name: str, makers: Iterable[str], limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.awaited = {*makers}
        self.is_first = True
        self.in_step = False
        """Whether the weights are on their way from one version to the next."""
        self._turn = threading.Condition()

    def begin_step(self) -> list[str]:
        """Waits for makers. From here until `in_step` is False again the weights change.

        Returns what the user should know of makers that were started again and did not come in
        time. Raises CallTimeout if one does not come before the first step.
        """
        notes = []
        with self._turn:
            limit_s = self.limit_s if self.is_first else LATE_S
            if not self._turn.wait_for(lambda: not self.awaited, limit_s):
                missing = ", ".join(sorted(self.awaited))
                if self.is_first:
                    raise CallTimeout(
                        self.name, "fit", limit_s, f"the engines of {missing} to be compared"
                    )
                notes.append(
                    f"after its restart the engines of {missing} were not compared within "
                    f"{limit_s:g} s"
                )
                self.awaited.clear()
            self.is_first = False
            self.in_step = True
        return notes

    def score(self, maker: str, has_weights: Callable[[], bool], compute: Callable[[], Any]) -> Any:
        """What `compute` returns, and the maker is done; None where the actor has not the maker's
        weights."""
        with self._turn:
            if self.in_step or not has_weights():
                self.awaited.add(maker)
                return None
            scored = compute()
            self.awaited.discard(maker)
            self._turn.notify_all()
            return scored
