"""What a trainer learns from, and what its updates return: the values that its loop passes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.protocol import DataProto, Future, Metric, merge_metrics
from verl_like.trainer.loop.balancing import RowWork


@dataclass(frozen=True)
class Experience:
    """A batch to learn from."""

    batch: DataProto
    """Of PPO (B * n,) responses, the n of a prompt next to each other, with `advantages` and
    `returns`; of training on examples their rows."""
    work: RowWork
    """By which the rows are divided among ranks."""
    metrics: Mapping[str, Metric]
    """What was measured while it was made."""


@dataclass(frozen=True)
class Update:
    """The updates of a training step or of a part of it, which may still be running."""

    pending: Sequence[Future[Any]]
    metrics: Mapping[str, Metric]
    """What is known before they end: how evenly the ranks are loaded, and how old the responses
    are."""

    @classmethod
    def of_parts(cls, parts: Sequence["Update"]) -> "Update":
        """That of a step whose parts these are."""
        pending = [future for part in parts for future in part.pending]
        return cls(pending, merge_metrics([part.metrics for part in parts]))

    def finish(self) -> None:
        """Waits for the updates. Raises what `get` raises."""
        for future in self.pending:
            future.get()

    def get(self) -> dict[str, Metric]:
        """Waits for the updates; returns their metrics and `metrics`."""
        metrics = merge_metrics(
            [self.metrics, *(future.get().meta_info.get("metrics", {}) for future in self.pending)]
        )
        if ratio := metrics.get("actor/rollout_ratio"):
            size = ratio.value**2 / metrics["actor/rollout_ratio_square"].value
            metrics["actor/eff_sample_size"] = Metric.mean(size, ratio.weight)
        return metrics
