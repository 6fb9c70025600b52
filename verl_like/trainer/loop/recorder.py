"""What makers, learners and trainers of every kind ask of a record."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from verl_like.protocol import Metric
from verl_like.single_controller import CallEvent
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.state.resume import ResumedRun


class Recorder(Protocol):
    """Takes down what happens while experience is made and learned from.

    `RunRecorder` writes it to the files of the run. A maker or a trainer of detached training has a
    `SideRecorder`, whose reports the run collects.
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
        self,
        step: int,
        num_rows: int,
        generation_of_row: Callable[[int], dict[str, str]],
        num_shown: int,
    ) -> None:
        """Shows `num_shown` rows of a validation batch, other ones each time."""


class LoopRecorder(Recorder, Protocol):
    """What the loop of a trainer asks of a record, which also has the checkpoints."""

    run_dir: Path
    """Where the checkpoints of the run are."""
    resumed: ResumedRun | None
    """The run that goes on."""
    saves_when_ended: bool
    """Whether the trainer looks at `is_ending` after each step, and then saves and ends."""
    is_ending: bool
    """Whether SIGTERM is to end the run after this step."""

    def step(
        self, step: int, total_steps: int, row: dict[str, float] | None = None
    ) -> AbstractContextManager[Callable[[Mapping[str, Metric | float]], None]]:
        """Times a step; metrics given to the yielded function are in its row."""

    def validation(self) -> AbstractContextManager[None]:
        """Around a validation, whose time is not that of a phase of the step."""

    def log_validation(self, metrics: dict[str, float], step: int = 0) -> None:
        """Adds a row for a validation by itself."""

    def is_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the validation after a step is the best so far, for which its checkpoint is
        kept."""

    def begin_checkpoint(
        self, partial: Path, step: int, state: dict[str, Any], groups: Mapping[str, WorkerGroup]
    ) -> None:
        """Keeps the state of a step until `commit_checkpoint` finds its files written."""

    def commit_checkpoint(self, wait: bool) -> None:
        """Makes what was begun a checkpoint, if it is written or with `wait`."""

    def complete_checkpoint(self, step: int) -> None:
        """The validation after the last step is recorded, too."""
