"""What makers, learners and trainers of every kind ask of a record."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from verl_like.single_controller import CallEvent


class Recorder(Protocol):
    """Takes down what happens while experience is made and learned from.

    `RunRecorder` writes it to the files of the run. A maker or a trainer of detached training has a `SideRecorder`,
    whose reports the run collects.
    """

    def record(self, event: CallEvent) -> None:
        """Adds a call of a worker, which has ended."""

    def timer(self, phase: str) -> AbstractContextManager[None]:
        """Adds the seconds of a phase on the driver."""

    def say(self, note: str) -> None:
        """Tells the user something."""

    def show_placement(self, rows: list[dict[str, str]]) -> None:
        """Shows where the workers are, see `placement_rows`, in place of what was shown before."""

    def show_generations(
        self, step: int, num_rows: int, generation_of_row: Callable[[int], dict[str, str]], num_shown: int
    ) -> None:
        """Shows `num_shown` rows of a validation batch, other ones each time."""
