"""Turns of an episode, as people see them. What shows them needs no torch."""

from dataclasses import dataclass, field


@dataclass
class ToolCall:
    """A call of a tool, for people."""

    name: str
    arguments: str
    result: str
    seconds: float
    is_error: bool = False


@dataclass
class Turn:
    """A call of the model and the calls of tools that followed it, for people."""

    row: int
    """The number of its row in the episode."""
    num_drawn: int
    seconds: float
    """How long the call of the model took."""
    tool_calls: list[ToolCall] = field(default_factory=list)
