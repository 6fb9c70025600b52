"""The protocols of recorders. Makers, learners and trainers report to a recorder what they do."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from verl_like.protocol import Metric
from verl_like.single_controller import CallEvent
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.state.resume import ResumedRun

Log = Callable[[Mapping[str, Metric | float]], None]
"""What `LoopRecorder.step` yields: a function that adds metrics to the row of that step."""


class Recorder(Protocol):
    """Records what happens while experience is made and learned from.

    There are two implementations: `RunRecorder` writes to the files of the run, and `SideRecorder`,
    which a maker or a trainer of detached training has, keeps reports until the run collects them.
    """

    def record(self, event: CallEvent) -> None:
        """Records a call of a worker that has ended."""

    def timer(self, phase: str) -> AbstractContextManager[None]:
        """Measures the code inside as seconds of a phase of the driver."""

    def say(self, note: str) -> None:
        """Shows a note to the user."""

    def show_placement(self, rows: list[dict[str, str]]) -> None:
        """Shows where the workers are, in the form of `placement_rows`. It replaces what was shown
        before."""

    def show_generations(
        self,
        step: int,
        num_rows: int,
        generation_of_row: Callable[[int], dict[str, str]],
        num_shown: int,
    ) -> None:
        """Shows `num_shown` of the `num_rows` rows of a validation batch, different ones each time.

        `generation_of_row` returns the texts that are shown of a row. It is called only for rows
        that are shown.
        """
        return  # a recorder may show none

    def show_episodes(self, records: Iterable[dict[str, Any]]) -> None:
        """Keeps records of episodes, in the form of `EpisodeRecord`."""


class LoopRecorder(Recorder, Protocol):
    """A recorder for the loop of a trainer. It manages the checkpoints too."""

    run_dir: Path
    """The folder of the run, in which its checkpoints are."""
    resumed: ResumedRun | None
    """The interrupted run that this one continues, or None for a new run."""
    saves_when_ended: bool
    """True while the loop looks at `is_ending` after each step, then saves and ends the run. While
    it is False, SIGTERM ends the run at once."""
    is_ending: bool
    """True if SIGTERM has come, and the run is to end after this step."""

    def step(
        self, step: int, total_steps: int, row: dict[str, float] | None = None
    ) -> AbstractContextManager[Log]:
        """Measures a step and writes its row at the end. It yields a function that adds metrics to
        the row. In a resumed run, `row` has what the row had before."""

    def validation(self) -> AbstractContextManager[None]:
        """Surrounds a validation and times it as `testing`. The calls of workers in it do not count
        in the step's other phases."""

    def log_validation(self, metrics: dict[str, float], step: int = 0) -> None:
        """Writes a row for a validation that is not part of a step."""

    def is_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Returns whether the validation after a step is the best so far. If so, the step's
        checkpoint is kept."""

    def begin_checkpoint(
        self, partial: Path, step: int, state: dict[str, Any], groups: Mapping[str, WorkerGroup]
    ) -> None:
        """Remembers the state of a step, while the workers of `groups` write the step's files into
        the folder `partial`. `commit_checkpoint` completes it."""

    def commit_checkpoint(self, wait: bool) -> None:
        """Makes the checkpoint that was begun a complete one, once all its files are written. With
        `wait` it waits for them; without, it does nothing while some are missing."""

    def complete_checkpoint(self, step: int) -> None:
        """Notes in the checkpoint of the last step that the validation after it is recorded."""
        return  # a recorder may leave that to others
