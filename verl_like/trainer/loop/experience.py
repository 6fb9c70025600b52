"""The two values that the training loop passes on: `Experience`, which a trainer learns from, and
`Update`, which stands for the updates on it."""

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
    """How much work each row is, by which the rows are divided among ranks."""
    metrics: Mapping[str, Metric]
    """What was measured while the batch was made."""


@dataclass(frozen=True)
class Update:
    """The updates of a training step, or of a part of one, which may still be running."""

    pending: Sequence[Future[Any]]
    """The calls of the workers, of each model that is updated."""
    metrics: Mapping[str, Metric]
    """What is known before the updates end: how evenly the ranks are loaded, and how old the
    responses are."""

    @classmethod
    def of_parts(cls, parts: Sequence["Update"]) -> "Update":
        """Joins the updates on the parts of one step."""
        pending: list[Future[Any]] = []
        for part in parts:
            pending.extend(part.pending)
        metrics = merge_metrics([part.metrics for part in parts])
        return cls(pending, metrics)

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
        of_updates: list[Mapping[str, Metric]] = [self.metrics]
        for future in self.pending:
            result = future.get()
            of_updates.append(result.meta_info.get("metrics", {}))
        metrics = merge_metrics(of_updates)
        ratio = metrics.get("actor/rollout_ratio")
        if ratio:
            ratio_square = metrics["actor/rollout_ratio_square"]
            size = ratio.value**2 / ratio_square.value
            metrics["actor/eff_sample_size"] = Metric.mean(size, ratio.weight)
        return metrics
