"""Sends the metrics of each step to the trackers of `trainer.logger`; a tracker that fails never stops the run.

A resumed run goes on in the run that each tracker had begun for it: `trackers.json` in its folder has their ids.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_like.trainer.checkpoint import write

logger = logging.getLogger(__name__)

Backend = Callable[[dict[str, float], int], None]
Started = tuple[Backend, str | None]
"""What takes the metrics of a step, and the tracker's id of its run, which a resumed run is given again."""


class Tracking:
    """Appends every step to `metrics.jsonl` and passes it on to the named trackers."""

    def __init__(
        self, backends: Sequence[str], run_dir: Path, project: str, experiment: str, config: dict[str, Any]
    ) -> None:
        self.jsonl = open(run_dir / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  (line buffered: a killed run keeps its lines)
        file = run_dir / "trackers.json"
        ids: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        self.backends: dict[str, Backend] = {}
        for name in backends:
            if name in TRACKERS:
                try:
                    log, run_id = TRACKERS[name](run_dir, project, experiment, config, ids.get(name))
                except Exception as error:
                    logger.warning("Tracker %s does not start and is off for the run: %s", name, error)
                    continue
                self.backends[name] = log
                ids |= {name: run_id} if run_id else {}
        write(file, json.dumps(ids))

    def log(self, metrics: dict[str, float], step: int) -> None:
        # JSON has no NaN; a metric that is not a number in a step has none there.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.jsonl.write(json.dumps({"step": step} | finite) + "\n")
        for name, backend in list(self.backends.items()):
            try:
                backend(metrics, step)
            except Exception as error:
                logger.warning("Tracker %s failed and is off for the rest of the run: %s", name, error)
                del self.backends[name]

    def close(self) -> None:
        self.jsonl.close()


def _tensorboard(run_dir: Path, project: str, experiment: str, config: dict[str, Any], run_id: str | None) -> Started:
    from torch.utils.tensorboard import SummaryWriter

    rows = (run_dir / "metrics.jsonl").read_text().splitlines()  # of a resumed run, those up to its checkpoint
    next_step = json.loads(rows[-1])["step"] + 1 if rows else None
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=next_step)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, None  # its run is the folder


def _wandb(run_dir: Path, project: str, experiment: str, config: dict[str, Any], run_id: str | None) -> Started:
    import wandb

    run = wandb.init(project=project, name=experiment, dir=str(run_dir), config=config, id=run_id, resume="allow")
    return lambda metrics, step: run.log(metrics, step=step), run.id


def _trackio(run_dir: Path, project: str, experiment: str, config: dict[str, Any], run_id: str | None) -> Started:
    import trackio

    name = run_id or f"{experiment} {run_dir.name}"  # by which it finds a run: that of the experiment is of several
    run = trackio.init(project=project, name=name, config=config, resume="allow")
    return lambda metrics, step: run.log(metrics, step=step), name


def _mlflow(run_dir: Path, project: str, experiment: str, config: dict[str, Any], run_id: str | None) -> Started:
    import mlflow

    mlflow.set_experiment(project)
    run = mlflow.start_run(run_id, run_name=experiment)

    def log(metrics: dict[str, float], step: int) -> None:
        # MLflow refuses "@" in a metric's name, which validation metrics have (mean@1).
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    return log, run.info.run_id


TRACKERS: dict[str, Callable[[Path, str, str, dict[str, Any], str | None], Started]] = {
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
