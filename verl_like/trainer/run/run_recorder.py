"""Keeps the record of a run: its folder, metrics, timeline, generations, checkpoints, console
output, and the report at the end."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from verl_like.files import cut_file
from verl_like.protocol import Metric
from verl_like.protocol.row_ops import map_leaves
from verl_like.single_controller import CallEvent
from verl_like.single_controller.failure import CallTimeout, WorkerError
from verl_like.single_controller.ray.worker_group import RayWorkerGroup
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.compose import to_yaml
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.run.charts import points_by_metric
from verl_like.trainer.run.console import RunConsole
from verl_like.trainer.run.display import Display, TableRows, printable
from verl_like.trainer.run.episodes import EPISODES, newest, read_episodes
from verl_like.trainer.run.report import write_report
from verl_like.trainer.run.router_load import Load, split_load
from verl_like.trainer.run.rows import readable_rows
from verl_like.trainer.run.timeline import Timeline
from verl_like.trainer.run.tracking import Row, Tracking
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.checkpoint import PendingCheckpoint
from verl_like.trainer.state.resume import FINGERPRINTS, ResumedRun, fingerprints_of, lock_run
from verl_like.trainer.state.run_state import IS_COMPLETE, LAST_ROW

RECORDS = ("metrics.jsonl", "timeline.jsonl")
"""The files that a resumed run cuts to their length at its checkpoint, and continues."""
GENERATIONS = "generations.jsonl"
"""Another such file, as EPISODES. A run of an earlier version does not have them."""
FILES = {
    "report.html": "report",
    "metrics.jsonl": "metrics",
    "timeline.jsonl": "timeline",
    GENERATIONS: "generations",
    EPISODES: "episodes",
    "config.yaml": "configuration",
    "tensorboard": "tensorboard",
}
"""What the files of a run are called when the run ends."""
LONGEST_TEXT = 4000
"""So many characters of a text of an episode are kept."""
LAST_WAIT_S = 60.0
"""For so many seconds a run that ends early waits for a checkpoint that is being written."""


class UnknownMetric(ValueError):
    """`trainer.best_ckpt_metric` is none of the validation's metrics. The message names them."""


class RunRecorder:
    """Writes the record of one run to `run_dir`, a new folder in `trainer.default_local_dir`.

    Nothing is overwritten. A resumed run continues in its folder, in which all that it wrote after
    its checkpoint is cut off.
    """

    def __init__(
        self, config: RunConfig, display: Display, resumed: ResumedRun | None = None
    ) -> None:
        trainer = config.trainer
        self.config = config
        self.display = display
        self.resumed = resumed
        state: dict[str, Any] = {}
        if resumed:
            state = resumed.checkpoint.state
            self.run_dir = resumed.run_dir
            self.lock = resumed.lock
            checkpoint.remove_partial(self.run_dir)
            checkpoint.set_aside(self.run_dir, after=resumed.checkpoint.step)
            _cut_records(self.run_dir, state["files"])
        else:
            parent = Path(trainer.default_local_dir).expanduser().resolve()
            self.run_dir = _new_run_dir(parent)
            self.lock = lock_run(self.run_dir)
            fingerprints = json.dumps(fingerprints_of(config), indent=1)
            checkpoint.write(self.run_dir / FINGERPRINTS, fingerprints)
        _link_latest(self.run_dir)
        checkpoint.write(self.run_dir / "config.yaml", to_yaml(config))
        self.timeline_file = _append_to(self.run_dir / "timeline.jsonl")
        self.timeline = Timeline(self.timeline_file, display)
        self.generations_file = _append_to(self.run_dir / GENERATIONS)
        self.episodes_file = _append_to(self.run_dir / EPISODES)
        self.redacted = config.redaction()
        self.console = RunConsole(display, self.redacted)
        self.tracking = Tracking(
            trainer.logger,
            self.run_dir,
            trainer.project_name,
            trainer.experiment_name,
            config.shown(),
        )
        shown: dict[str, Any] = state.get("shown", {})
        self.generations: list[dict[str, Any]] = shown.get("generations", [])
        """The rows of the first and of the last validation. The report shows them."""
        self.num_validations: int = shown.get("num_validations", 0)
        self.best: dict[str, Any] = state.get("best", {})
        """The step with the best validation so far, its metric, and the value by which it was
        compared. It is empty if there is none."""
        saved_steps = checkpoint.steps(self.run_dir)
        is_there = self.best.get("step") in saved_steps
        if not is_there or self.best["metric"] != trainer.best_ckpt_metric:
            self.best = {}
        self.has_best_metric = False
        """True once a validation has reported `trainer.best_ckpt_metric`."""
        self.router_load: Load = []
        """The load of experts in the last step that trained a mixture of experts."""
        self.placement: TableRows = []
        self.notes: list[str] = []
        """What the summary of the report says besides what the run did."""
        self.metrics: Row = {}
        """The metrics of the present step, without timings."""
        self.seconds: Row = {}
        """The seconds of the driver's phases in the present step."""
        self.step_started = 0.0
        self.is_in_step = False
        """True until the row of the present step is written."""
        self.saves_when_ended = False
        """True if the trainer checks `is_ending` after each step, and then saves and ends."""
        self.is_ending = False
        """True if SIGTERM has come, and the run is to end after this step."""
        self.begun: PendingCheckpoint | None = None
        """A checkpoint of the present step, whose row is not written yet."""
        self.pending: PendingCheckpoint | None = None
        """A checkpoint whose files workers are writing."""
        self.started = time.time()

    def record(self, event: CallEvent) -> None:
        """Adds a call of a worker to the timeline."""
        self.timeline.record(event)

    def say(self, note: str, *, in_report: bool = False) -> None:
        """Tells the user something on the console, and in the report if it is asked for."""
        self.console.say(note)
        if in_report:
            self.notes.append(note)

    def show_placement(self, rows: TableRows) -> None:
        """Shows where the workers are. This replaces what was shown before."""
        self.placement = rows
        if rows:
            self.console.show_table("Placement", rows)

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the code inside to `timing_s/{phase}` of the step."""
        started = time.time()
        yield
        seconds = time.time() - started
        seconds_before = self.seconds.get(phase, 0.0)
        self.seconds[phase] = seconds_before + seconds

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Marks the calls inside as a validation, so that they do not count in the step's
        phases."""
        self.timeline.is_validating = True
        with self.timer("testing"):
            yield
        self.timeline.is_validating = False

    @contextlib.contextmanager
    def step(
        self, step: int, total_steps: int, row: Row | None = None
    ) -> Iterator[Callable[[Mapping[str, Metric | float]], None]]:
        """Measures a step and writes its row at the end.

        It yields a function that adds metrics to the row. If the run was interrupted in this step,
        `row` has what `row_so_far` had returned.
        """
        if not self.timeline.step:
            self.console.start_training(total_steps)
        self.timeline.start_step(step)
        self.seconds = {}
        self.step_started = time.time()
        self.is_in_step = True
        self.metrics = dict(row) if row else {"training/global_step": step}
        yield self.log
        if row:
            metrics = self.metrics | _timings(self.seconds)
        else:
            metrics = self.row_so_far()
        metrics = self.without_counts(metrics)
        self.tracking.log(metrics, step)
        self.is_in_step = False
        self.add_record()
        self.console.show_step(step, total_steps, metrics)
        if self.is_ending:
            self.say(
                "SIGTERM: the run ends with the checkpoint of this step; a second one ends it "
                "without."
            )

    def without_counts(self, row: Row) -> Row:
        """Returns the row of a step with metrics of the load of experts in place of its counts,
        which the report shows."""
        metrics, load = split_load(row)
        self.router_load = load or self.router_load
        return metrics

    def log(self, metrics: Mapping[str, Metric | float]) -> None:
        """Adds metrics to the row of the present step."""
        for name, each in metrics.items():
            value = each.value if isinstance(each, Metric) else each
            self.metrics[name] = value

    def row_so_far(self) -> Row:
        """The metrics of the present step, with its timings until now."""
        seconds = self.timeline.phase_seconds() | self.seconds
        step_seconds = time.time() - self.step_started
        seconds["step"] = step_seconds
        metrics = self.metrics | _timings(seconds)
        metrics["perf/time_per_step"] = step_seconds
        testing_seconds = seconds.get("testing", 0.0)
        saving_seconds = seconds.get("save_checkpoint", 0.0)
        training_seconds = step_seconds - testing_seconds - saving_seconds
        if "perf/total_num_tokens" in metrics:
            throughput = metrics["perf/total_num_tokens"] / training_seconds
            metrics["perf/total_throughput"] = throughput
            metrics["perf/throughput"] = throughput / self.config.num_processes_of_run
        if critical_path_seconds := self.timeline.critical_path_seconds():
            metrics["perf/overlap"] = critical_path_seconds / training_seconds
        return metrics

    def log_validation(self, metrics: Row, step: int = 0) -> None:
        """Writes a row for a validation that is not part of a step, for instance that before the
        first step."""
        self._value_of(metrics)
        self.tracking.log(metrics, step)
        self.console.show_validation(step, metrics)

    def is_best(self, step: int, metrics: Row) -> bool:
        """Returns whether the validation after this step has the best `trainer.best_ckpt_metric` so
        far.

        The checkpoint of the best step is kept until another step is better. Raises UnknownMetric
        if the validation does not report the metric and none of this process has reported it yet.
        """
        value = self._value_of(metrics)
        best_value = self.best.get("value", -math.inf)
        # Also for NaN, which is not larger than anything.
        if not value > best_value:
            return False
        metric = self.config.trainer.best_ckpt_metric
        self.best = {"step": step, "metric": metric, "value": value}
        return True

    def _value_of(self, metrics: Row) -> float:
        """Returns `trainer.best_ckpt_metric` of a validation, or its negative if less is better. It
        is NaN if there is no such metric."""
        name = self.config.trainer.best_ckpt_metric
        if name is None:
            return math.nan
        if name not in metrics and not self.has_best_metric:
            raise UnknownMetric(
                f"trainer.best_ckpt_metric={name} is not what the validation reports; name one of "
                f"these: {', '.join(sorted(metrics))}."
            )
        self.has_best_metric = True
        value = metrics.get(name, math.nan)
        if name.endswith(("loss", "brier")):
            return -value
        return value

    def show_generations(
        self,
        step: int,
        num_rows: int,
        generation_of_row: Callable[[int], dict[str, str]],
        num_shown: int,
    ) -> None:
        """Shows and keeps `num_shown` of the `num_rows` rows of a validation batch, different ones
        each time."""
        num_shown = min(num_shown, num_rows)
        first = self.num_validations * num_shown
        self.num_validations += 1
        rows = []
        for number in range(first, first + num_shown):
            generation = generation_of_row(number % num_rows)
            row = {name: _shown(self.redacted(text)) for name, text in generation.items()}
            rows.append(row)
        if not rows:
            return
        # Those of the first validation stay.
        self.generations = self.generations[:num_shown]
        for row in rows:
            row_of_step = {"step": step} | row
            self.generations.append(row_of_step)
            line = json.dumps(row_of_step)
            self.generations_file.write(line + "\n")
        self.console.show_table(f"Generations at step {step}", rows)

    def show_episodes(self, records: Iterable[dict[str, Any]]) -> None:
        """Keeps records of episodes. Secrets in their texts are masked, and the middle of long
        texts is left out."""
        for record in records:
            line = json.dumps(map_leaves(self._kept, record))
            self.episodes_file.write(line + "\n")

    def _kept(self, value: Any) -> Any:
        """A value of JSON as it is kept, if it is a text."""
        if isinstance(value, str):
            return _clipped(self.redacted(value), LONGEST_TEXT)
        return value

    def terminate(self, number: int, frame: Any) -> None:
        """Handles SIGTERM, which a pre-empted run gets. The run ends after a checkpoint of this
        step, or at once if the trainer does not save now, or if a second SIGTERM comes."""
        if not self.saves_when_ended or self.is_ending:
            self.begun = None
            self.pending = None
            raise KeyboardInterrupt
        # Nothing is printed here, because the console may be printing.
        self.is_ending = True

    def begin_checkpoint(
        self, partial: Path, step: int, state: dict[str, Any], groups: Mapping[str, WorkerGroup]
    ) -> None:
        """Keeps the state of a step until `commit_checkpoint` finds that its files are written.

        The state of the record is added at the end of the step. If the checkpoint is committed
        before, it has the row so far, and a resumed run completes the step with that.
        """
        assert self.pending is None and self.begun is None
        self.begun = PendingCheckpoint(partial, step, state, groups)

    def add_record(self) -> None:
        """Adds the state of the record to the checkpoint that was begun, and the row so far if the
        row of the step is not written yet."""
        if not self.begun:
            return
        state = self.begun.state | self.state_of_record()
        if self.is_in_step:
            row = self.row_so_far()
            state[LAST_ROW] = {name: float(value) for name, value in row.items()}
        self.pending = replace(self.begun, state=state)
        self.begun = None

    def complete_checkpoint(self, step: int) -> None:
        """Notes in a checkpoint that the validation of its step is recorded. Raises OSError."""
        self.renew_checkpoint(step, {IS_COMPLETE: True})

    def renew_checkpoint(self, step: int, changes: dict[str, Any]) -> None:
        """Changes the state of a complete checkpoint. Raises OSError."""
        folder = checkpoint.folder_of_step(self.run_dir, step)
        checkpoint.renew(folder, changes)
        self._remove_old_checkpoints(self.best)

    def state_of_record(self) -> dict[str, Any]:
        """Makes sure that the files of the record are on the disk, and returns what a resumed run
        needs to continue them."""
        files = {}
        for file in (
            self.tracking.jsonl,
            self.timeline_file,
            self.generations_file,
            self.episodes_file,
        ):
            descriptor = file.fileno()
            os.fsync(descriptor)
            name = Path(file.name).name
            files[name] = os.fstat(descriptor).st_size
        shown = {"generations": self.generations, "num_validations": self.num_validations}
        return {"files": files, "shown": shown, "best": self.best}

    def commit_checkpoint(self, wait: bool, timeout_s: float | None = None) -> None:
        """Completes the checkpoint that was begun, if all its files are written. With `wait` it
        waits for them, for `timeout_s` seconds if that is given.

        Then it removes old checkpoints. Raises WorkerError, CallTimeout or OSError, which leave
        earlier checkpoints as they are.
        """
        self.add_record()
        pending = self.pending
        if pending is None:
            return
        files = pending.files(wait, timeout_s)
        if files is None:
            return
        self.pending = None
        checkpoint.commit(pending.partial, pending.step, pending.state, files)
        self._remove_old_checkpoints(pending.state["best"])

    def _remove_old_checkpoints(self, best: dict[str, Any]) -> None:
        """Removes the oldest checkpoints if there are too many, but not the best one."""
        num_newest = self.config.trainer.max_ckpt_to_keep
        others = [best["step"]] if best else []
        checkpoint.keep(self.run_dir, num_newest, others)

    def close(self, outcome: str) -> None:
        """Completes a checkpoint that is being written, drops one whose step has not ended, closes
        the files, writes `report.html`, and says where everything is.

        `outcome` says how the run ended. Signals that stop a run are ignored meanwhile, see
        `train_or_raise`.
        """
        with self.lock:  # the folder is locked until everything is written
            # The step failed before its row was written, so its checkpoint is dropped.
            self.begun = None
            try:
                # There may be one if the run was interrupted or failed.
                self.commit_checkpoint(wait=True, timeout_s=LAST_WAIT_S)
            except (WorkerError, CallTimeout, OSError) as error:
                reason = str(error).splitlines()[0]
                self.say(f"The checkpoint that was being written is lost: {reason}")
            checkpoint.remove_partial(self.run_dir)  # the files that follow need room on the disk
            self.console.close()
            missing = self.tracking.close()
            self.timeline_file.close()
            self.generations_file.close()
            self.episodes_file.close()
            metrics = readable_rows((self.run_dir / "metrics.jsonl").read_bytes())
            try:
                self._write_report(outcome, metrics)
            # Texts of data and model may not be drawable, but the run itself is complete.
            except Exception as error:
                self.say(f"The report is not written: {type(error).__name__}: {error}")
            self.say(f"\n{outcome}")
            self._say_validations(metrics)
            for sentence in missing:
                self.say(f"  {sentence}")
            self._say_files()

    def _say_validations(self, metrics: list[Row]) -> None:
        """Says the first and the last value of each main metric of the validations."""
        for name, points in points_by_metric(metrics).items():
            if name.startswith("val-core/") and len(points) > 1:
                values = [value for _step, value in points]
                self.say(f"  {name}: {values[0]:.3f} at first, {values[-1]:.3f} at last")

    def _say_files(self) -> None:
        """Says which files the run has written: those of FILES, the best checkpoint, and the models
        in the format of Hugging Face."""
        self.say(f"  in {self.run_dir}:")
        files = dict(FILES)
        if self.best:
            files[f"global_step_{self.best['step']}"] = f"best {self.best['metric']}"
        # These are without the checkpoints that were set aside.
        for step in checkpoint.steps(self.run_dir):
            folder = checkpoint.folder_of_step(self.run_dir, step)
            for model in sorted(folder.glob("*/huggingface")):
                name = str(model.relative_to(self.run_dir))
                files[name] = f"{model.parent.name}, Hugging Face format"
        for name, what in files.items():
            path = self.run_dir / name
            if path.exists() and path.stat().st_size:
                self.say(f"    {name:<40} {what}")

    def _write_report(self, outcome: str, metrics: list[Row]) -> None:
        """Writes `report.html`."""
        trainer = self.config.trainer
        title = f"{trainer.project_name} / {trainer.experiment_name}"
        seconds = time.time() - self.started
        did = f"{outcome} {len(metrics)} rows of metrics, {seconds:.0f} s."
        summary = " ".join([did, *self.notes])
        write_report(
            self.run_dir / "report.html",
            title=self.redacted(title),
            summary=self.redacted(summary),
            metrics=metrics,
            steps=self.timeline.last_steps(),
            placement=self.placement,
            router_load=self.router_load,
            generations=self.generations,
            episodes=newest(read_episodes(self.run_dir / EPISODES)),
            config=to_yaml(self.config),
            display=self.display,
        )


def _cut_records(run_dir: Path, lengths: Mapping[str, int]) -> None:
    """Cuts the files of the record to the lengths that they had at a checkpoint. Raises OSError."""
    for name in RECORDS:
        cut_file(run_dir / name, lengths[name])
    for name in (GENERATIONS, EPISODES):
        with contextlib.suppress(FileNotFoundError):
            cut_file(run_dir / name, lengths.get(name, 0))


def _append_to(file: Path) -> TextIO:
    """Opens a file to append to it. Each line is written at once, so that a run that is killed has
    all of them."""
    return open(file, "a", buffering=1)


def _timings(seconds: Row) -> Row:
    """The metrics of phases that took these seconds."""
    return {f"timing_s/{phase}": value for phase, value in seconds.items()}


def placement_rows(groups: list[tuple[str, list[str], RayWorkerGroup]]) -> TableRows:
    """The pool, roles and processes of each worker group, with a row for each node. It waits until
    the processes have started."""
    rows = []
    for pool, roles, group in groups:
        nodes = group.worker_nodes
        for node in dict.fromkeys(nodes):
            ranks = []
            pids = []
            for rank, its_node in enumerate(nodes):
                if its_node == node:
                    ranks.append(str(rank))
                    pids.append(str(group.worker_pids[rank]))
            row = {
                "pool": pool,
                "node": node,
                "ranks": ", ".join(ranks),
                "processes": ", ".join(pids),
                "roles": " + ".join(roles),
            }
            rows.append(row)
    return rows


def _shown(text: str, max_length: int = 240) -> str:
    """The text on one line. If it is long, its middle is left out."""
    return _clipped(text, max_length).replace("\n", " ")


def _clipped(text: str, max_length: int) -> str:
    """The text as `printable` returns it. If it is long, its middle is left out."""
    if len(text) > max_length:
        half = max_length // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return printable(text)


def _new_run_dir(parent: Path) -> Path:
    """Makes `parent/<date>_<time>`, with a number if another run has started in this second."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    run_dir = parent / stamp
    number = 1
    while run_dir.exists():
        number += 1
        run_dir = parent / f"{stamp}_{number}"
    run_dir.mkdir(parents=True)
    return run_dir


def _link_latest(run_dir: Path) -> None:
    """Makes `latest`, in the folder of the runs, a link to this run."""
    link = run_dir.parent / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)  # a killed process with the same id may have left one
    link.symlink_to(run_dir.name)
    link.replace(run_dir.parent / "latest")
