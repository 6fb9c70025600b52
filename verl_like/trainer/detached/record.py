"""The record of a detached run: what makers and trainers report is written in the order of the
training steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from verl_like.protocol import Metric, merge_metrics, metric_values
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state.checkpoint import PendingCheckpoint, partial_of_step


class DetachedRecord:
    """Writes a step when all trainers have done it, a validation after its step, and completes
    checkpoints."""

    def __init__(self, config: DetachedConfig, recorder: RunRecorder) -> None:
        self.config = config
        self.recorder = recorder
        resumed = recorder.resumed.checkpoint if recorder.resumed else None
        self.rows: dict[int, list[tuple[Mapping[str, Metric], float]]] = defaultdict(list)
        """What the trainers that have done a step reported of it, see `SideRecorder.rows`."""
        self.states: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        """What trainers saved of a step, see `SideRecorder.states`."""
        self.waits: dict[str, dict[float, float]] = defaultdict(dict)
        """When each side waited for others: the ends by the starts."""
        self.step = resumed.step if resumed else 0
        """The last one that is written."""
        self.files: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        """The files of the trainers that have written theirs, by the step."""
        self.begun: PendingCheckpoint | None = None
        """A checkpoint that the trainers write."""
        self.validations: dict[int, Mapping[str, Metric]] = {}
        """Those that are not written, by their version."""
        self.validated: int = resumed.state["validated"] if resumed else -1
        """The version of the last one that is written."""

    def add(self, name: str, report: SideRecorder) -> None:
        """Takes what happened on a side since its last report."""
        for event in report.events:
            self.recorder.record(event)
        self.waits[name].update(report.waits)
        self.recorder.saves_when_ended |= report.saves_when_ended
        for step, metrics, ended in report.rows:
            if name in self.config.detached.maker_names:
                self.validations[step] = metrics
            else:
                self.rows[step].append((metrics, ended))
        for step, state in report.states:
            self.states[step].append(state)
        for step, files in report.files:
            self.files[step].append(files)
        for note in report.notes:
            self.recorder.say(f"{name}: {note}")

    def log(self) -> None:
        """Writes what is complete, after makers too have said how long they waited until then."""
        for step in [
            step
            for step, rows in self.rows.items()
            if len(rows) == len(self.config.detached.trainer_names)
        ]:
            # The one before, which trainers wait for before they save again
            self.commit_checkpoint()
            self.log_validations(step - 1)
            self.log_step(step)
            if states := self.states.pop(step, []):
                self.begin_checkpoint(states)
        self.commit_checkpoint()
        self.log_validations(self.step)

    def log_validations(self, version: int) -> None:
        """Writes the validations up to a version."""
        for each in [each for each in self.validations if each <= version]:
            self.recorder.log_validation(metric_values(self.validations.pop(each)), each)
            self.validated = each

    def log_step(self, step: int) -> None:
        """Writes the metrics of a step, which all trainers have done."""
        rows, ended = zip(*self.rows.pop(step), strict=True)
        values = metric_values(merge_metrics(rows))
        values |= {"training/global_step": step} | self.idle_shares(
            max(ended), values["timing_s/step"]
        )
        self.recorder.timeline.start_step(step)
        self.recorder.tracking.log(values, step)
        self.recorder.console.show_step(step, self.config.num_steps_of_run, values)
        self.step = step

    def begin_checkpoint(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Keeps the state of the step written last, which the trainers saved, until their files are
        written."""
        (ledger,) = [each["ledger"] for each in states if each["ledger"]]
        state = {"ledger": ledger, "validated": self.validated} | self.recorder.state_of_record()
        # Not with the recorder: a run that ends now would complete it.
        self.begun = PendingCheckpoint(
            partial_of_step(self.recorder.run_dir, self.step), self.step, state, {}
        )

    def commit_checkpoint(self) -> None:
        """Makes what was begun a checkpoint, if all trainers have written their files."""
        if self.begun and len(self.files[self.begun.step]) == len(
            self.config.detached.trainer_names
        ):
            parts = self.files.pop(self.begun.step)
            self.begun.written = {name: digest for files in parts for name, digest in files.items()}
            self.recorder.pending = self.begun
            self.begun = None
            self.recorder.commit_checkpoint(wait=True)

    def renew_checkpoint(self) -> None:
        """Adds the validations since then to the checkpoint of the step written last."""
        self.recorder.renew_checkpoint(
            self.step, {"validated": self.validated} | self.recorder.state_of_record()
        )

    def idle_shares(self, ended: float, seconds: float) -> dict[str, float]:
        """In which share of a step's `seconds`, until it `ended`, each side waited for others."""
        shares = {}
        for name, waits in self.waits.items():
            self.waits[name] = within = {
                start: end for start, end in waits.items() if end > ended - seconds
            }
            waited_s = sum(
                max(0.0, min(end, ended) - max(start, ended - seconds))
                for start, end in within.items()
            )
            shares[f"detached/idle/{name}"] = waited_s / seconds
        return shares
