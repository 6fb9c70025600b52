"""Sends the metrics of each step to the trackers of `trainer.logger`; a tracker that fails never stops the run."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Backend = Callable[[dict[str, float], int], None]


class Tracking:
    """Appends every step to `metrics.jsonl` and passes it on to the named trackers."""

    def __init__(
        self, backends: Sequence[str], run_dir: Path, project: str, experiment: str, config: dict[str, Any]
    ) -> None:
        self.jsonl = open(run_dir / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  (line buffered: a killed run keeps its lines)
        self.backends = {
            name: TRACKERS[name](run_dir, project, experiment, config) for name in backends if name in TRACKERS
        }

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


def _tensorboard(run_dir: Path, project: str, experiment: str, config: dict[str, Any]) -> Backend:
    from torch.utils.tensorboard import SummaryWriter

    rows = (run_dir / "metrics.jsonl").read_text().splitlines()  # of a resumed run, those up to its checkpoint
    next_step = json.loads(rows[-1])["step"] + 1 if rows else None
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=next_step)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb(run_dir: Path, project: str, experiment: str, config: dict[str, Any]) -> Backend:
    import wandb

    run = wandb.init(project=project, name=experiment, dir=str(run_dir), config=config)
    return lambda metrics, step: run.log(metrics, step=step)


def _trackio(run_dir: Path, project: str, experiment: str, config: dict[str, Any]) -> Backend:
    import trackio

    run = trackio.init(project=project, name=experiment, config=config)
    return lambda metrics, step: run.log(metrics, step=step)


def _mlflow(run_dir: Path, project: str, experiment: str, config: dict[str, Any]) -> Backend:
    import mlflow

    mlflow.set_experiment(project)
    mlflow.start_run(run_name=experiment)
    # MLflow refuses "@" in a metric's name, which validation metrics have (mean@1).
    return lambda metrics, step: mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in metrics.items()}, step=step)


TRACKERS: dict[str, Callable[[Path, str, str, dict[str, Any]], Backend]] = {
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
