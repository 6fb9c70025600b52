"""Which rows each rank of a call gets: as many as the others, and with `trainer.balance_batch` about as much work."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_like.protocol import DataProto, Future, Metric
from verl_like.single_controller import Ordered
from verl_like.single_controller.worker_group import BoundMethod
from verl_like.workers.planning.flops import ModelCost
from verl_like.workers.planning.partition import balanced_rank_order, rank_order


@dataclass(frozen=True)
class RowWork:
    """Lengths and work of the (B,) rows of a batch; ranks get equal work if `balance`."""

    tokens_B: np.ndarray
    """Tokens of prompt and response."""
    flops_B: np.ndarray
    """Of a forward pass of the policy."""
    balance: bool

    @classmethod
    def of(cls, batch: DataProto, cost: ModelCost, *, balance: bool) -> "RowWork":
        return cls(batch.batch["attention_mask"].sum(-1).numpy(), cost.forward(batch.tensors()).numpy(), balance)

    def submit(
        self, method: BoundMethod, batch: DataProto, num_mini_batch_rows: int | None = None, *beside: Ordered
    ) -> Future[Any]:
        """Starts a method on the batch, whose rows are divided among its ranks; results are in the batch's own order.

        With n = `num_mini_batch_rows`, mini-batch i of an update is rows i * n to (i + 1) * n of the batch, an equal
        share on each of any number of ranks. Without it the batch is one mini-batch, whose rows need not divide by
        the ranks: then it stays as it is.
        """
        num_ranks = data_parallel_size(method)
        if num_ranks is None or (num_mini_batch_rows is None and (not self.balance or len(batch) % num_ranks)):
            assert not beside
            return method.remote(batch)
        return method.remote(Ordered(batch, self.order(num_ranks, num_mini_batch_rows or len(batch))), *beside)

    def order(self, num_ranks: int, num_mini_batch_rows: int) -> np.ndarray:
        """(B,) int64: the rows of the first rank, then those of the second, and so on."""
        if self.balance:
            return balanced_rank_order(self.flops_B, num_mini_batch_rows, num_ranks)
        return rank_order(len(self.flops_B), num_mini_batch_rows, num_ranks)

    def metrics(self, method: BoundMethod, num_mini_batch_rows: int) -> dict[str, Metric]:
        """How even the work of an update's ranks is, before and after balancing.

        `global_seqlen/*`: tokens of a rank. `perf/imbalance/*`: FLOPs of each mini-batch's busiest rank over those of
        its mean rank, both summed; 1 is even.
        """
        num_ranks = data_parallel_size(method)
        assert num_ranks is not None
        plain = rank_order(len(self.flops_B), num_mini_batch_rows, num_ranks)
        used = self.order(num_ranks, num_mini_batch_rows)
        before, after = (self.tokens_B[order].reshape(num_ranks, -1).sum(-1) for order in (plain, used))
        metrics = {
            "global_seqlen/min": Metric.min(before.min()),
            "global_seqlen/max": Metric.max(before.max()),
            "global_seqlen/minmax_diff": Metric.max(before.max() - before.min()),
            "global_seqlen/balanced_min": Metric.min(after.min()),
            "global_seqlen/balanced_max": Metric.max(after.max()),
            "global_seqlen/mean": Metric.mean(before.mean()),
        }
        for name, order in (("unbalanced", plain), ("balanced", used)):
            rank_minibatch_row = self.flops_B[order].reshape(num_ranks, -1, num_mini_batch_rows // num_ranks)
            work = rank_minibatch_row.sum(-1)
            metrics[f"perf/imbalance/{name}"] = Metric.mean(work.max(0).sum() / work.mean(0).sum(), weight=work.mean())
        return metrics


def data_parallel_size(method: BoundMethod) -> int | None:
    """Over how many ranks a method splits its batch; None where it does not."""
    collect_ranks = method.spec.dispatch_mode.collect_ranks
    return None if collect_ranks is None else len(collect_ranks(method.group))
