"""Errors that end a run with their text alone, without a traceback."""


class EngineMismatch(RuntimeError):
    """An engine, or a copy of the actor, does not compute the actor's model."""
