"""What a trainer shows of its metrics and its worker calls, as data that the trainer gives to the
record of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Display:
    """Names of metrics and methods; what a run does not have is left out.

    Metrics that begin with `val-core/` are shown wherever they are.
    """

    step_line: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    """Of each step: label, names of metrics (the first that exists is shown), format."""
    phases: tuple[str, ...] = ()
    """Whose seconds, `timing_s/<phase>`, the line of a step shows, in this order."""
    phase_of_method: Mapping[str, str] = field(default_factory=dict)
    """The phase that calls of a worker method belong to; of any other method, its own name."""
    stages: tuple[tuple[str, ...], ...] = ((),)
    """Methods of each stage of a step; a stage needs all results of the one before. The one that is
    empty has all other methods."""
    process_of_role: Mapping[str, str] = field(default_factory=dict)
    """Kind of the processes of a role that does not share those of all others."""
    charts: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    """Of the report: title, names of metrics (one that ends in "/" stands for all that begin with
    it), y label."""
    histograms: tuple[tuple[str, str, str], ...] = ()
    """Of the report: title, name of a metric, x label. A name that ends in "_" stands for all that
    begin with it: each says in its last part a number, and in its value the share of it in a
    step."""


def printable(text: str) -> str:
    """The text with a space for each control character and lone surrogate.

    The former could steer a terminal, and no file or figure takes the latter. Line breaks stay.
    """
    return "".join(
        character if character.isprintable() or character == "\n" else " " for character in text
    )
