"""Describes what the record of a run shows of the metrics and of the calls of workers. Each trainer
has such a description."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TableRows = list[dict[str, str]]
"""The rows of a table. The keys of the first row are its head."""
ShownMetrics = tuple[str, tuple[str, ...], str]
"""A label and the names of metrics, with the format in which a line shows one of them, or with the
label of a chart's y-axis."""


@dataclass(frozen=True)
class Display:
    """Names the metrics and methods that are shown. Those that a run does not have are left out.

    Metrics that begin with `val-core/` are shown in any case.
    """

    step_line: tuple[ShownMetrics, ...] = ()
    """The parts of a step's line. Each shows the first of its metrics that the step has."""
    phases: tuple[str, ...] = ()
    """The phases whose seconds, `timing_s/<phase>`, the line of a step shows, in this order."""
    phase_of_method: Mapping[str, str] = field(default_factory=dict)
    """The phase to which calls of a worker's method belong. Any other method is a phase by
    itself."""
    stages: tuple[tuple[str, ...], ...] = ((),)
    """The methods of each stage of a step. A stage needs all results of the stage before. The empty
    one has all methods that are not named."""
    process_of_role: Mapping[str, str] = field(default_factory=dict)
    """What the processes of a role are called, if the role does not share those of all others."""
    charts: tuple[ShownMetrics, ...] = ()
    """The charts of the report. A name that ends in "/" stands for all that begin with it."""
    histograms: tuple[tuple[str, str, str], ...] = ()
    """For each histogram of the report its title, the name of a metric, and the label of the
    x-axis. A name that ends in "_" stands for all that begin with it: the rest of such a name is a
    number, and the value is the share of that number in a step."""


def printable(text: str) -> str:
    """Returns the text with a space in place of each character that is not printable, such as
    control characters and lone surrogates. Line breaks stay.

    A control character could change the state of a terminal. A lone surrogate cannot be written to
    a file or drawn.
    """
    shown = []
    for char in text:
        stays = char.isprintable() or char == "\n"
        shown.append(char if stays else " ")
    return "".join(shown)
