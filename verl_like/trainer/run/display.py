"""Describes what a trainer shows of its metrics and its worker calls. The trainer gives this to the
record of its run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Display:
    """Names of metrics and methods; what a run does not have is left out.

    Metrics that begin with `val-core/` are shown wherever they are.
    """

    step_line: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    """The parts of a step's line: label, names of metrics (the first that exists is shown),
    format."""
    phases: tuple[str, ...] = ()
    """The phases whose seconds, `timing_s/<phase>`, the line of a step shows, in this order."""
    phase_of_method: Mapping[str, str] = field(default_factory=dict)
    """The phase that calls of a worker method belong to. Any other method is a phase of its own."""
    stages: tuple[tuple[str, ...], ...] = ((),)
    """The methods of each stage of a step. A stage needs all results of the one before. The empty
    one has all methods that are not named."""
    process_of_role: Mapping[str, str] = field(default_factory=dict)
    """The kind of the processes of a role that does not share those of all others."""
    charts: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    """The charts of the report: title, names of metrics (one that ends in "/" stands for all that
    begin with it), y label."""
    histograms: tuple[tuple[str, str, str], ...] = ()
    """The histograms of the report: title, name of a metric, x label. A name that ends in "_"
    stands for all that begin with it: the last part of each is a number, and its value the share of
    that number in a step."""


def printable(text: str) -> str:
    """Returns the text with a space for each control character and lone surrogate.

    A control character could steer a terminal, and no file or figure takes a lone surrogate. Line
    breaks stay.
    """
    return "".join(
        character if character.isprintable() or character == "\n" else " " for character in text
    )
