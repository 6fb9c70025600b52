"""The two values of the training loop: `Experience`, from which a trainer learns, and `Update`,
which has the calls that train on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.protocol import DataProto, Future, Metric, merge_metrics
from verl_like.trainer.loop.balancing import RowWork


@dataclass(frozen=True)
class Experience:
    """A batch to learn from."""

    batch: DataProto
    """In PPO (B * n,) responses with `advantages` and `returns`, the n responses to a prompt next
    to each other. In training on examples the rows of the examples."""
    work: RowWork
    """The work of each row. The rows are divided among ranks by it."""
    metrics: Mapping[str, Metric]
    """The metrics of making the batch."""


@dataclass(frozen=True)
class Update:
    """The updates of a training step, or of a part of a step. They may still be running."""

    pending: Sequence[Future[Any]]
    """For each model that is updated, the call of its workers."""
    metrics: Mapping[str, Metric]
    """The metrics that are known before the updates end: how evenly the ranks are loaded, and how
    old the responses are."""

    @classmethod
    def of_parts(cls, parts: Sequence["Update"]) -> "Update":
        """Joins the updates on the parts of one step."""
        pending: list[Future[Any]] = []
        metrics = []
        for part in parts:
            pending.extend(part.pending)
            metrics.append(part.metrics)
        return cls(pending, merge_metrics(metrics))

    def finish(self) -> None:
        """Waits until the updates have ended. Raises the error of one that failed."""
        for future in self.pending:
            future.get()

    def get(self) -> dict[str, Metric]:
        """Waits until the updates have ended, and returns their metrics merged with `metrics`.
        Raises the error of one that failed.

        With r, the ratio of the trainer's probability of a token to the rollout's, the effective
        sample size is mean(r)^2 / mean(r^2). It is computed here, because it needs the two means
        over all optimizer steps. An update that did not measure r has none.
        """
        parts = [self.metrics]
        for future in self.pending:
            result = future.get()
            metrics_of_model = result.meta_info.get("metrics", {})
            parts.append(metrics_of_model)
        metrics = merge_metrics(parts)
        if ratio := metrics.get("actor/rollout_ratio"):
            ratio_square = metrics["actor/rollout_ratio_square"]
            size = ratio.value**2 / ratio_square.value
            metrics["actor/eff_sample_size"] = Metric.mean(size, ratio.weight)
        return metrics
