"""Errors that end a run with their text alone, without a traceback."""


class EngineMismatch(RuntimeError):
    """An engine, or a copy of the actor, does not compute the actor's model."""


class InputRefused(ValueError):
    """An input of a run is refused, before Ray starts. The text says what to change."""


class RunFailed(RuntimeError):
    """A part of a run failed. The text has the cause, and what to do."""
