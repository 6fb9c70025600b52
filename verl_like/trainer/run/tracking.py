"""Sends the metrics of each step to the trackers of `trainer.logger`.

No tracker delays a step or stops the run. A resumed run continues in the run that each tracker
began for it. `trackers.json` in the run's folder has the ids of these runs.
"""

import functools
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from verl_like.files import read_json
from verl_like.trainer.run.rows import readable_rows
from verl_like.trainer.state import checkpoint

logger = logging.getLogger(__name__)

IDS = "trackers.json"
_MAX_ID_BYTES = 1 << 16
Row = dict[str, float]
"""The values of a step's or a validation's metrics, by their names."""
MAX_WAITING = 1000
"""So many rows of metrics may wait for a tracker. It does not get further ones."""
FINISH_S = 30.0
"""For so many seconds the end of a run waits for all trackers."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it starts."""

    run_dir: Path
    project: str
    experiment: str
    config: dict[str, Any]
    run_id: str | None
    """The tracker's id of the run that this one continues, or None for a new run."""
    next_step: int | None
    """The step after those that the run has done already, or None if it has done none."""


@dataclass(frozen=True)
class Tracker:
    """A tracker that has started. One thread starts, uses and finishes it."""

    log: Callable[[Row, int], object]
    """Takes the metrics of a step."""
    finish: Callable[[], object]
    run_id: str | None = None
    """The tracker's id of its run. None if the tracker needs only the folder to continue it."""


class TrackerThread:
    """Gives the rows of metrics to a tracker in a thread of its own."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name = name
        self.start = start
        self.rows: queue.SimpleQueue[tuple[Row, int] | None] = queue.SimpleQueue()
        """The rows that wait for the tracker. None means the end of the run."""
        self.num_given = 0
        self.num_logged = 0
        self.problem = ""
        """Why the tracker lacks rows, or "" if that is not known."""
        self.thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def log(self, metrics: Row, step: int) -> None:
        """Queues a row, unless `MAX_WAITING` rows are waiting, and returns at once."""
        self.num_given += 1
        if self.rows.qsize() < MAX_WAITING:
            self.rows.put((dict(metrics), step))
        else:
            self.problem = f"more than {MAX_WAITING} rows waited for it"

    def end(self) -> None:
        """Queues the end of the run, and returns at once."""
        self.rows.put(None)

    def missing(self, deadline: float) -> str | None:
        """Waits until the tracker has ended, but not after `deadline` by time.monotonic().

        Returns a sentence if the tracker lacks rows or has not ended. The thread of one that has
        not ended ends with the process.
        """
        seconds = max(0.0, deadline - time.monotonic())
        self.thread.join(seconds)
        num_missing = self.num_given - self.num_logged
        if not num_missing and not self.thread.is_alive():
            return None
        problem = self.problem or f"it did not end within {FINISH_S:g} s"
        return (
            f"Tracker {self.name} lacks {num_missing} of {self.num_given} rows of metrics "
            f"({problem}); metrics.jsonl has all of them."
        )

    def _run(self) -> None:
        """Starts the tracker, gives it each row, and finishes it."""
        what = "does not start"
        try:
            tracker = self.start()
            what = "failed"
            while (row := self.rows.get()) is not None:
                tracker.log(*row)
                self.num_logged += 1
            tracker.finish()
        # No error of a tracker ends the run.
        except (Exception, SystemExit) as error:
            self.problem = f"{type(error).__name__}: {error}"
            logger.warning(
                "Tracker %s %s and is off for the rest of the run: %s",
                self.name,
                what,
                self.problem,
            )


class Tracking:
    """Appends every step to `metrics.jsonl` and passes it on to the named trackers."""

    def __init__(
        self,
        backends: Sequence[str],
        run_dir: Path,
        project: str,
        experiment: str,
        config: dict[str, Any],
    ) -> None:
        # Each line is written at once, so that a killed run keeps its lines.
        self.jsonl = open(run_dir / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.ids_file = run_dir / IDS
        self.ids = _read_ids(self.ids_file)
        self.ids_lock = threading.Lock()
        rows = readable_rows((run_dir / "metrics.jsonl").read_bytes())
        steps = [row["step"] for row in rows if type(row["step"]) is int]
        next_step = steps[-1] + 1 if steps else None
        self.trackers: list[TrackerThread] = []
        for name in backends:
            if name in TRACKERS:
                run_id = self.ids.get(name)
                run = TrackedRun(run_dir, project, experiment, config, run_id, next_step)
                start = functools.partial(self._start, name, run)
                self.trackers.append(TrackerThread(name, start))

    def _start(self, name: str, run: TrackedRun) -> Tracker:
        """Starts a tracker. The id of its run is kept before the run has any metrics."""
        tracker = TRACKERS[name](run)
        with self.ids_lock:
            if tracker.run_id:
                self.ids[name] = tracker.run_id
            text = json.dumps(self.ids)
            checkpoint.write(self.ids_file, text)
        return tracker

    def log(self, metrics: Row, step: int) -> None:
        """Writes a row of metrics to the file, and gives it to the trackers without waiting for
        them."""
        # JSON has no NaN. A metric that is not finite in a step is left out of the file.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        line = json.dumps({"step": step} | finite)
        self.jsonl.write(line + "\n")
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def close(self) -> list[str]:
        """Ends the trackers within `FINISH_S`. Returns a sentence for each that lacks rows or has
        not ended."""
        self.jsonl.close()
        deadline = time.monotonic() + FINISH_S
        for tracker in self.trackers:
            tracker.end()
        missing = []
        for tracker in self.trackers:
            if sentence := tracker.missing(deadline):
                missing.append(sentence)
        return missing


def _read_ids(file: Path) -> dict[str, str]:
    """Reads the ids of the trackers' runs. If the file cannot be read, there are none, and a
    warning says so."""
    if not file.exists():
        return {}
    try:
        ids = read_json(file, _MAX_ID_BYTES)
        schema = TypeAdapter(dict[str, str])
        return schema.validate_python(ids, strict=True)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): trackers begin a new run.", file, error)
        return {}


def _tensorboard(run: TrackedRun) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    folder = str(run.run_dir / "tensorboard")
    writer = SummaryWriter(folder, purge_step=run.next_step)

    def log(metrics: Row, step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _wandb(run: TrackedRun) -> Tracker:
    import wandb

    begun = wandb.init(
        project=run.project,
        name=run.experiment,
        dir=str(run.run_dir),
        config=run.config,
        id=run.run_id,
        resume="allow",
    )
    return Tracker(lambda metrics, step: begun.log(metrics, step=step), begun.finish, begun.id)


def _trackio(run: TrackedRun) -> Tracker:
    import trackio

    # trackio finds a run by its name, and an experiment has several runs.
    name = run.run_id or f"{run.experiment} {run.run_dir.name}"
    begun = trackio.init(project=run.project, name=name, config=run.config, resume="allow")
    return Tracker(lambda metrics, step: begun.log(metrics, step=step), begun.finish, name)


def _mlflow(run: TrackedRun) -> Tracker:
    import mlflow

    # MLflow's experiment is our project, and our experiment is the name of its run.
    mlflow.set_experiment(run.project)
    begun = mlflow.start_run(run.run_id, run_name=run.experiment)

    def log(metrics: Row, step: int) -> None:
        # MLflow refuses "@" in a metric's name, which validation metrics have (mean@1).
        renamed = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        mlflow.log_metrics(renamed, step=step)

    return Tracker(log, mlflow.end_run, begun.info.run_id)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


def require_trackers(backends: Sequence[str]) -> None:
    """Raises ValueError for a configured tracker whose package is not installed."""
    for name in backends:
        if name in TRACKERS and find_spec(name) is None:
            raise ValueError(
                f"trainer.logger has {name!r}, but the package {name} is not installed: "
                f"pip install -e '.[{name}]', or leave it out of trainer.logger."
            )
