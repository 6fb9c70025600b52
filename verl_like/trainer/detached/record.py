"""The record of a detached run: it writes what makers and trainers report in the order of the
training steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from verl_like.protocol import Metric, merge_metrics, metric_values
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state.checkpoint import Digests, PendingCheckpoint, partial_of_step


class DetachedRecord:
    """Writes a step when all trainers have done it, and a validation after the step of its version,
    and completes checkpoints."""

    def __init__(self, config: DetachedConfig, recorder: RunRecorder) -> None:
        self.config = config
        self.recorder = recorder
        self.rows: dict[int, list[tuple[Mapping[str, Metric], float]]] = defaultdict(list)
        """By step, the rows of the trainers that have done it, see `SideRecorder.rows`."""
        self.states: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        """By step, what trainers saved of it beside files, see `SideRecorder.states`."""
        self.waits: dict[str, dict[float, float]] = defaultdict(dict)
        """By the name of a side, its waits for other sides: start -> end."""
        self.step = 0
        """The last step that is written."""
        self.files: dict[int, list[Digests]] = defaultdict(list)
        """By step, the files of the trainers that have written theirs of its checkpoint."""
        self.begun: PendingCheckpoint | None = None
        """A checkpoint that the trainers are writing."""
        self.validations: dict[int, Mapping[str, Metric]] = {}
        """By version, the validations that are not written yet."""
        self.validated = -1
        """The version of the last validation that is written, or -1."""
        if recorder.resumed:
            resumed = recorder.resumed.checkpoint
            self.step = resumed.step
            self.validated = resumed.state["validated"]

    def add(self, name: str, report: SideRecorder) -> None:
        """Takes in what happened on the maker or trainer `name` since its last report."""
        recorder = self.recorder
        for event in report.events:
            recorder.record(event)
        self.waits[name].update(report.waits)
        recorder.saves_when_ended |= report.saves_when_ended
        is_maker = name in self.config.detached.maker_names
        for step, metrics, ended in report.rows:
            if is_maker:
                self.validations[step] = metrics
            else:
                self.rows[step].append((metrics, ended))
        for step, state in report.states:
            self.states[step].append(state)
        for step, files in report.files:
            self.files[step].append(files)
        recorder.show_episodes(report.episodes)
        for note in report.notes:
            recorder.say(f"{name}: {note}")

    def log(self) -> None:
        """Writes the steps and validations that are complete. It is called when all sides, makers
        too, have reported until now, because a step's row says how long they waited."""
        num_trainers = self.config.detached.num_trainers
        for step, rows in list(self.rows.items()):
            if len(rows) != num_trainers:
                continue
            # This is the checkpoint before, for which trainers wait before they save again.
            self.commit_checkpoint()
            self.log_validations(step - 1)
            self.log_step(step)
            states = self.states.pop(step, [])
            if states:
                self.begin_checkpoint(states)
        self.commit_checkpoint()
        self.log_validations(self.step)

    def log_validations(self, version: int) -> None:
        """Writes the validations of versions up to `version`."""
        for validated in list(self.validations):
            if validated > version:
                continue
            values = metric_values(self.validations.pop(validated))
            self.recorder.log_validation(values, validated)
            self.validated = validated

    def log_step(self, step: int) -> None:
        """Writes the row of a step that all trainers have done."""
        reported = self.rows.pop(step)
        metrics_of_step = merge_metrics([metrics for metrics, _ended in reported])
        values = metric_values(metrics_of_step)
        last_end = max(ended for _metrics, ended in reported)
        idle_shares = self.idle_shares(last_end, values["timing_s/step"])
        values["training/global_step"] = step
        values |= idle_shares
        recorder = self.recorder
        values = recorder.without_counts(values)
        recorder.timeline.start_step(step)
        recorder.tracking.log(values, step)
        num_steps = self.config.num_steps_of_run
        recorder.console.show_step(step, num_steps, values)
        self.step = step

    def begin_checkpoint(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Remembers the state of the step that was written last, until all trainers have written
        their files. One of `states`, of the trainer that did the step last, has the ledger's."""
        (ledger,) = [state["ledger"] for state in states if state["ledger"]]
        state = {"ledger": ledger, "validated": self.validated}
        state |= self.recorder.state_of_record()
        folder = partial_of_step(self.recorder.run_dir, self.step)
        # The recorder does not get it yet, because it would complete it if the run ended now.
        self.begun = PendingCheckpoint(folder, self.step, state, {})

    def commit_checkpoint(self) -> None:
        """Completes the checkpoint that was begun, if all trainers have written their files."""
        if self.begun is None:
            return
        step = self.begun.step
        if len(self.files[step]) != self.config.detached.num_trainers:
            return
        self.begun.written = {}
        for files_of_trainer in self.files.pop(step):
            self.begun.written |= files_of_trainer
        self.recorder.pending = self.begun
        self.begun = None
        self.recorder.commit_checkpoint(wait=True)

    def renew_checkpoint(self) -> None:
        """Adds the validations that were written since to the checkpoint of the last step."""
        state = {"validated": self.validated}
        state |= self.recorder.state_of_record()
        self.recorder.renew_checkpoint(self.step, state)

    def idle_shares(self, ended: float, seconds: float) -> dict[str, float]:
        """Returns the share of a step in which each side waited for others.

        The step took `seconds` until the time `ended`. Waits from before it are forgotten.
        """
        started = ended - seconds
        shares = {}
        for name, waits in self.waits.items():
            within = {}
            waited = 0.0
            for start, end in waits.items():
                if end <= started:
                    continue
                within[start] = end
                in_step = min(end, ended) - max(start, started)
                waited += max(0.0, in_step)
            self.waits[name] = within
            shares[f"detached/idle/{name}"] = waited / seconds
        return shares
