"""Which rows each rank of a call gets: about as many as the others, and with
`trainer.balance_batch` as much work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_like.protocol import DataProto, Future, Metric
from verl_like.protocol.samples import SAMPLE_COLUMN
from verl_like.single_controller import Ordered
from verl_like.single_controller.worker_group import BoundMethod
from verl_like.workers.models.packing import Rows
from verl_like.workers.planning.flops import ModelCost
from verl_like.workers.planning.partition import rank_shares


@dataclass(frozen=True)
class RowWork:
    """Lengths and work of the (B,) rows of a batch; ranks get equal work if `balance`."""

    tokens_B: np.ndarray
    """Tokens of prompt and response."""
    flops_B: np.ndarray
    """Of a forward pass of the policy."""
    balance: bool
    sample_starts: np.ndarray
    """The first row of each sample, and the number of rows; ranks and mini-batches get whole
    samples."""

    @classmethod
    def of(cls, batch: DataProto, cost: ModelCost, *, balance: bool) -> "RowWork":
        rows = Rows.of(batch)
        flops_B = cost.forward(rows.lengths_B, rows.num_scored_B).numpy()
        return cls(rows.lengths_B.numpy(), flops_B, balance, rows.sample_starts.numpy())

    def submit(
        self,
        method: BoundMethod,
        batch: DataProto,
        num_of_step: int | None = None,
        *beside: Ordered,
    ) -> Future[Any]:
        """Starts a method on the batch, whose rows are divided among its ranks; results are in the
        batch's own order.

        With n = `num_of_step`, mini-batch i of an update is the samples i * n to (i + 1) * n of the
        batch, about an equal share on each of any number of ranks, and the column `mini_batch` says
        so. Without it the batch is one. Raises ValueError for a method that does not read this
        column, where ranks have other numbers of rows.
        """
        num_ranks = data_parallel_size(method)
        if num_ranks is not None and num_of_step is not None:
            read = method.spec.read_columns
            is_even = num_of_step % num_ranks == 0 and self.num_samples % num_of_step == 0
            if (
                not is_even
                and self.num_samples > num_of_step
                and read is not None
                and "mini_batch" not in read
            ):
                raise ValueError(
                    f"{method.group.role}.{method.spec.name} does not read the column mini_batch, "
                    f"which says what each of {num_ranks} ranks trains in each step of "
                    f"{num_of_step} samples: add it to its reads"
                )
            return method.remote(self.in_mini_batches(batch, num_ranks, num_of_step), *beside)
        assert not beside
        if num_ranks is None or not len(batch):
            return method.remote(batch)
        return method.remote(
            ordered(self.with_numbers(batch), self.shares(num_ranks, self.num_samples))
        )

    def in_mini_batches(self, batch: DataProto, num_ranks: int, num_of_step: int) -> Ordered:
        """The batch with the column `mini_batch`, as the ranks get it."""
        numbered = self.with_numbers(batch)
        numbered.tensor_batch["mini_batch"] = torch.from_numpy(self.sample_of_row // num_of_step)
        return ordered(numbered, self.shares(num_ranks, num_of_step))

    def with_numbers(self, batch: DataProto) -> DataProto:
        """The batch with a number of its own for each sample: samples that come side by side stay
        apart."""
        numbered = batch.select()
        if SAMPLE_COLUMN in numbered.tensors():
            numbered.tensor_batch[SAMPLE_COLUMN] = torch.from_numpy(self.sample_of_row)
        return numbered

    @property
    def num_samples(self) -> int:
        return len(self.sample_starts) - 1

    @property
    def sample_of_row(self) -> np.ndarray:
        """(B,) the number of the sample that each row is of."""
        return np.repeat(np.arange(self.num_samples), np.diff(self.sample_starts))

    def shares(
        self, num_ranks: int, num_of_step: int, balance: bool | None = None
    ) -> list[np.ndarray]:
        """The rows of each rank: `rank_shares` of the samples; balanced as this object says, or as
        `balance` does."""
        balance = self.balance if balance is None else balance
        work = (
            np.add.reduceat(self.flops_B, self.sample_starts[:-1])
            if self.num_samples and balance
            else None
        )
        of_ranks = rank_shares(self.num_samples, num_of_step, num_ranks, work_B=work)
        rows_of = np.split(np.arange(len(self.flops_B)), self.sample_starts[1:-1])
        return [
            np.concatenate([np.arange(0), *(rows_of[sample] for sample in share)])
            for share in of_ranks
        ]

    def metrics(self, method: BoundMethod, num_of_step: int) -> dict[str, Metric]:
        """How even the work of an update's ranks is, before and after balancing.

        `global_seqlen/*`: tokens of a rank. `perf/imbalance/*`: FLOPs of each mini-batch's busiest
        rank over those of its mean rank, both summed; 1 is even.
        """
        num_ranks = data_parallel_size(method)
        assert num_ranks is not None
        if not len(self.flops_B):
            return {}
        plain = self.shares(num_ranks, num_of_step, balance=False)
        used = self.shares(num_ranks, num_of_step)
        before, after = (
            np.array([self.tokens_B[rows].sum() for rows in shares]) for shares in (plain, used)
        )
        metrics = {
            "global_seqlen/min": Metric.min(before.min()),
            "global_seqlen/max": Metric.max(before.max()),
            "global_seqlen/minmax_diff": Metric.max(before.max() - before.min()),
            "global_seqlen/balanced_min": Metric.min(after.min()),
            "global_seqlen/balanced_max": Metric.max(after.max()),
            "global_seqlen/mean": Metric.mean(before.mean()),
        }
        num_mini_batches = -(-self.num_samples // num_of_step)
        mini_batch_of_row = self.sample_of_row // num_of_step
        for name, shares in (("unbalanced", plain), ("balanced", used)):
            work = np.zeros((num_ranks, num_mini_batches))
            for rank, rows in enumerate(shares):
                np.add.at(work[rank], mini_batch_of_row[rows], self.flops_B[rows])
            metrics[f"perf/imbalance/{name}"] = Metric.mean(
                work.max(0).sum() / work.mean(0).sum(), weight=work.mean()
            )
        return metrics


def ordered(batch: DataProto, shares: Sequence[np.ndarray]) -> Ordered:
    """The batch of which rank i gets the rows `shares[i]`."""
    return Ordered(batch, np.concatenate(shares), [len(rows) for rows in shares])


def data_parallel_size(method: BoundMethod) -> int | None:
    """Over how many ranks a method splits its batch; None where it does not."""
    collect_ranks = method.spec.dispatch_mode.collect_ranks
    return None if collect_ranks is None else len(collect_ranks(method.group))
