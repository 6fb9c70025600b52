"""How the rows of a batch are divided among the ranks of a call: about as many for each rank and,
with `trainer.balance_batch`, as much work for each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl_like.protocol import DataProto, Future, Metric
from verl_like.protocol.samples import SAMPLE_COLUMN
from verl_like.single_controller import Ordered
from verl_like.single_controller.worker_group import BoundMethod
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.shared_prompts import first_rows_of_prompts, lengths_of_shared_prompts
from verl_like.workers.planning.flops import ModelCost
from verl_like.workers.planning.partition import rank_shares


@dataclass(frozen=True)
class RowWork:
    """How long the (B,) rows of a batch are and how much work each is, by which they are divided.

    A sample may have several rows. Ranks and mini-batches get whole samples.
    """

    tokens_B: np.ndarray
    """Tokens of prompt and response."""
    flops_B: np.ndarray
    """FLOPs of a forward pass of the policy."""
    balance: bool
    """If true, ranks get about equal work. If false, they get the samples in their order."""
    sample_starts: np.ndarray
    """(number of samples + 1,) the first row of each sample and, as the last entry, B."""
    prompts_S: np.ndarray | None = None
    """The prompt of each sample as a number, if samples of a prompt should come to the same rank,
    see `rank_shares`."""

    @classmethod
    def of(
        cls, batch: DataProto, cost: ModelCost, *, balance: bool, shares_prompts: bool = False
    ) -> "RowWork":
        """Returns the work of a batch of jagged columns.

        With `shares_prompts` the samples of a prompt come to the same rank, as far as `rank_shares`
        says, and only the first row of a prompt has its work.
        """
        rows = Rows.of(batch)
        lengths_B = rows.lengths_B
        flops_B = cost.forward(lengths_B, rows.num_scored_B)
        starts = rows.sample_starts
        prompts_S = None
        if shares_prompts:
            first_rows_B = first_rows_of_prompts(rows["prompts"])
            prompts_S = first_rows_B[starts[:-1]].numpy()
            prompt_lengths_B = lengths_of_shared_prompts(rows, first_rows_B)
            no_scored_B = torch.zeros_like(prompt_lengths_B)
            flops_B -= cost.forward(prompt_lengths_B, no_scored_B)
        return cls(lengths_B.numpy(), flops_B.numpy(), balance, starts.numpy(), prompts_S)

    def submit(
        self,
        method: BoundMethod,
        batch: DataProto,
        num_of_step: int | None = None,
        *beside: Ordered,
    ) -> Future[Any]:
        """Calls a method of a worker group with the batch, whose rows are divided among its ranks,
        and returns at once. The results come in the order of `batch`.

        An update gives `num_of_step`, the samples of one optimizer step over all ranks. Mini-batch
        i then consists of the samples i * num_of_step to (i + 1) * num_of_step of the batch for any
        number of ranks, and the column `mini_batch` tells each rank which of its rows are in it. A
        forward pass leaves `num_of_step` out, and the batch is divided as a whole. `beside` are
        further arguments of an update.

        Raises ValueError if ranks would get different numbers of samples in a step, and the method
        does not read the column `mini_batch`.
        """
        num_ranks = data_parallel_size(method)
        is_empty_pass = num_of_step is None and not len(batch)
        assert not beside or (num_ranks is not None and num_of_step is not None)
        if num_ranks is None or is_empty_pass:
            return method.remote(batch)
        if num_of_step is not None:
            self.require_mini_batch_column(method, num_ranks, num_of_step)
        in_order = self.divided(batch, num_ranks, num_of_step)
        return method.remote(in_order, *beside)

    def require_mini_batch_column(
        self, method: BoundMethod, num_ranks: int, num_of_step: int
    ) -> None:
        """Raises ValueError if a method needs the column `mini_batch`, but does not read it.

        A method that does without it takes equally many rows for each step. That is wrong where
        the samples cannot be divided equally, unless they are all of one step.
        """
        read = method.spec.read_columns
        reads_column = read is None or "mini_batch" in read
        is_one_step = self.num_samples <= num_of_step
        steps_are_even = num_of_step % num_ranks == 0
        steps_are_whole = self.num_samples % num_of_step == 0
        is_divided_by_sample = not self.balance or self.prompts_S is None
        is_even = steps_are_even and steps_are_whole and is_divided_by_sample
        if not (reads_column or is_one_step or is_even):
            raise ValueError(
                f"{method.group.role}.{method.spec.name} does not read the column mini_batch, "
                f"which says what each of {num_ranks} ranks trains in each step of "
                f"{num_of_step} samples: add it to its reads"
            )

    def divided(self, batch: DataProto, num_ranks: int, num_of_step: int | None) -> Ordered:
        """Returns the batch in the order in which the ranks get its rows. With `num_of_step` it has
        the column `mini_batch`.

        Its samples are numbered from 0. Two samples may have the same number when they come from
        different batches. With balancing their rows can become neighbours, and would then be taken
        for one sample.
        """
        numbered = batch.select()
        if SAMPLE_COLUMN in numbered.tensors():
            numbered.tensor_batch[SAMPLE_COLUMN] = torch.from_numpy(self.sample_of_row)
        if num_of_step is not None:
            mini_batch_of_row = self.sample_of_row // num_of_step
            numbered.tensor_batch["mini_batch"] = torch.from_numpy(mini_batch_of_row)
        shares = self.shares(num_ranks, num_of_step or self.num_samples)
        order = np.concatenate(shares)
        num_rows = [len(rows) for rows in shares]
        return Ordered(numbered, order, num_rows)

    @property
    def num_samples(self) -> int:
        return len(self.sample_starts) - 1

    @property
    def sample_of_row(self) -> np.ndarray:
        """The number (B,) of the sample to which each row belongs."""
        num_rows_S = np.diff(self.sample_starts)
        samples = np.arange(self.num_samples)
        return np.repeat(samples, num_rows_S)

    def shares(self, num_ranks: int, num_of_step: int) -> list[np.ndarray]:
        """Returns the rows of each rank, as int64 arrays: whole samples, one mini-batch after the
        other. A rank without a sample gets an empty array."""
        first_rows = self.sample_starts[:-1]
        work_S = None
        if self.balance and self.num_samples:
            work_S = np.add.reduceat(self.flops_B, first_rows)
        samples_of_ranks = rank_shares(
            self.num_samples, num_of_step, num_ranks, work_S, self.prompts_S
        )
        all_rows = np.arange(len(self.flops_B))
        rows_of_samples = np.split(all_rows, first_rows[1:])  # an array for each sample
        shares = []
        for samples in samples_of_ranks:
            rows = [np.arange(0)]  # concatenate needs at least one array
            for sample in samples:
                rows.append(rows_of_samples[sample])
            shares.append(np.concatenate(rows))
        return shares

    def metrics(self, method: BoundMethod, num_of_step: int) -> dict[str, Metric]:
        """Returns how even the work of an update's ranks is, without balancing and as it is
        divided.

        `global_seqlen/*` are tokens of a rank. `perf/imbalance/*` is the FLOPs of each mini-batch's
        busiest rank over those of its mean rank, both summed over mini-batches; 1 is even. An empty
        batch has no metrics.
        """
        num_ranks = data_parallel_size(method)
        assert num_ranks is not None
        if not len(self.flops_B):
            return {}
        without_balancing = replace(self, balance=False)
        plain = without_balancing.shares(num_ranks, num_of_step)
        used = self.shares(num_ranks, num_of_step)
        before = self._tokens_of(plain)
        after = self._tokens_of(used)
        least = before.min()
        most = before.max()
        metrics = {
            "global_seqlen/min": Metric.min(least),
            "global_seqlen/max": Metric.max(most),
            "global_seqlen/minmax_diff": Metric.max(most - least),
            "global_seqlen/balanced_min": Metric.min(after.min()),
            "global_seqlen/balanced_max": Metric.max(after.max()),
            "global_seqlen/mean": Metric.mean(before.mean()),
        }
        num_mini_batches = -(-self.num_samples // num_of_step)  # rounded up
        mini_batch_of_row = self.sample_of_row // num_of_step
        divisions = {"unbalanced": plain, "balanced": used}
        for name, shares in divisions.items():
            flops = np.zeros((num_ranks, num_mini_batches))
            for flops_of_rank, rows in zip(flops, shares, strict=True):
                mini_batches = mini_batch_of_row[rows]
                np.add.at(flops_of_rank, mini_batches, self.flops_B[rows])
            busiest = flops.max(0).sum()
            mean = flops.mean(0).sum()
            imbalance = Metric.mean(busiest / mean, weight=flops.mean())
            metrics[f"perf/imbalance/{name}"] = imbalance
        return metrics

    def _tokens_of(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tokens of each rank, if rank i gets the rows `shares[i]`."""
        return np.array([self.tokens_B[rows].sum() for rows in shares])


def data_parallel_size(method: BoundMethod) -> int | None:
    """Returns among how many ranks a method divides its batch, or None if each rank gets all of
    it."""
    collect_ranks = method.spec.dispatch_mode.collect_ranks
    if collect_ranks is None:
        return None
    return len(collect_ranks(method.group))
