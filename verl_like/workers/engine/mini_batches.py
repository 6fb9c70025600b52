"""Turns one rank's rows into micro-batches: for forward passes, and for optimizer steps exact over
all ranks."""

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from verl_like.algorithms.aggregation import Aggregate, agg_loss
from verl_like.algorithms.masked import masked_sum
from verl_like.protocol import Metric, merge_metrics
from verl_like.protocol.row_ops import RowTaker, jagged_from_lengths, jagged_parts
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.engine.base import TrainingEngine
from verl_like.workers.engine.mesh import own_ranks
from verl_like.workers.engine.micro_batch import MicroBatch
from verl_like.workers.engine.throughput import Stopwatch
from verl_like.workers.models.packing import Rows
from verl_like.workers.pinned_memory import to_host
from verl_like.workers.planning.partition import MicroBatching, pack_into_micro_batches

# Legend: B rows of this rank, R response length; of a micro-batch b rows, K response tokens.


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step on this rank, and their counts over all ranks."""

    micro_batches: list[torch.Tensor]
    """(b,) int64 each, indices of this rank's rows; as many on every rank."""
    num_tokens: float
    """Response tokens that count, over all ranks."""
    num_sequences: float
    """Samples with at least one such token, over all ranks."""
    share: float
    """1 / number of its micro-batches over all ranks that give results: the first of those that
    share sequences."""
    response_length: int | None
    """R, where the batch says it."""

    def aggregate(self, loss_agg_mode: str) -> Aggregate:
        """`agg_loss` over this mini-batch: micro-batches and ranks add up to its exact loss."""
        return partial(agg_loss, loss_agg_mode=loss_agg_mode, **self.global_batch_info)

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """The counts as arguments of `agg_loss`. The engine adds gradients up over ranks, so
        `dp_size` is 1."""
        return {
            "dp_size": 1,
            "batch_num_tokens": self.num_tokens,
            "global_batch_size": self.num_sequences,
            "loss_scale_factor": self.response_length,
        }


@dataclass(frozen=True)
class UpdateSchedule:
    """How rows become optimizer steps."""

    num_mini_batch_samples: int
    """Samples of an optimizer step over all ranks of a trainer, where a batch does not say by
    `mini_batch` which are one."""
    micro_batching: MicroBatching
    """Which of them share a forward and backward pass."""
    epochs: int
    """Passes over the rows."""


@dataclass(frozen=True)
class DeviceMetric:
    """A metric whose numbers are still on the device: fetching them waits for all that the device
    has to do."""

    numbers: tuple[torch.Tensor, ...]
    """Scalars, without their graph."""
    finish: Callable[..., Metric]
    """(the numbers as floats) -> the metric."""

    @classmethod
    def loss(cls, value: torch.Tensor, mini_batch: MiniBatch) -> "DeviceMetric":
        """A micro-batch's part of a loss. Merged, it is the mean over mini-batches of the sum of
        their parts."""
        share = mini_batch.share
        return cls((value.detach(),), lambda number: Metric.mean(number / share, weight=share))

    @classmethod
    def max(cls, value: torch.Tensor) -> "DeviceMetric":
        return cls((value.detach(),), Metric.max)

    @classmethod
    def token_mean(cls, total: torch.Tensor, num_tokens: torch.Tensor) -> "DeviceMetric":
        """The mean of a quantity summed over tokens; it stays a mean over all tokens when
        merged."""
        numbers = total.detach(), num_tokens
        return cls(
            numbers, lambda total, tokens: Metric.mean(total / max(tokens, 1), weight=tokens)
        )

    @classmethod
    def of(cls, name: str, value: torch.Tensor | float, mask_BR: torch.Tensor) -> "DeviceMetric":
        """What a loss reports of a micro-batch: a value by token (B, R), by row (B,), or one
        number, its token mean.

        Raises ValueError for a tensor of another shape.
        """
        num_tokens = mask_BR.sum()
        if not isinstance(value, torch.Tensor):
            return cls((num_tokens,), lambda tokens: Metric.mean(value, weight=tokens))
        if value.shape == mask_BR.shape:
            return cls.token_mean(masked_sum(value.detach().float(), mask_BR), num_tokens)
        if value.ndim == 0:
            return cls(
                (value.detach(), num_tokens), lambda mean, tokens: Metric.mean(mean, weight=tokens)
            )
        has_tokens_B = mask_BR.bool().any(-1)
        if value.shape == has_tokens_B.shape:
            return cls.token_mean(
                masked_sum(value.detach().float(), has_tokens_B), has_tokens_B.sum()
            )
        raise ValueError(
            f"the metric {name} of a loss has shape {tuple(value.shape)} for rows of shape "
            f"{tuple(mask_BR.shape)}: return a value by token (B, R), by row (B,), or one number"
        )


MicroMetrics = dict[str, DeviceMetric]

MicroLoss = Callable[[MicroBatch, MiniBatch], tuple[torch.Tensor, MicroMetrics]]
"""(rows of a micro-batch, its mini-batch) -> the micro-batch's share of the loss, and its
metrics."""


def forward(
    engine: TrainingEngine,
    rows: Rows,
    micro_batching: MicroBatching,
    run: Callable[[MicroBatch], tuple[torch.Tensor, ...]],
    *,
    by_token: bool = True,
) -> list[torch.Tensor]:
    """Runs a model over all rows without gradients; `run` maps a micro-batch of b rows to tensors.

    Returns what `run` returned for all rows, in their order, on the host: jagged columns of a value
    for each response token, (K,) or padded (b, R), or without `by_token` of tensors with one entry
    a row. A trainer can do it without other trainers of its model.
    """
    all_samples = torch.arange(len(rows.sample_starts) - 1)
    (micro_batches,) = _micro_batches(
        rows, [all_samples], micro_batching, engine.sequence_parallel_size, group=own_ranks()
    )
    outputs = []
    with engine.on_device():
        for at in micro_batches:
            micro = MicroBatch(rows.take(at), engine.device)
            # Nothing of a pass without rows of its own.
            outputs.append(
                [micro.of_tokens(each) if by_token else each[: len(at)] for each in run(micro)]
            )
    order = torch.cat(micro_batches)
    columns = [to_host(torch.cat(column)) for column in zip(*outputs, strict=True)]
    if by_token:
        lengths = jagged_parts(rows["responses"])[1].diff()[order]
        columns = [jagged_from_lengths(column, lengths) for column in columns]
    in_order = RowTaker(order.argsort())
    return [in_order.tensor(column) for column in columns]


def update(
    engine: TrainingEngine,
    rows: Rows,
    schedule: UpdateSchedule,
    loss: MicroLoss,
    prefix: str,
    part: tuple[int, int],
    beside: tuple[Rows, MicroLoss] | None = None,
    check_steps: Callable[[int], None] = lambda num_steps: None,
) -> dict[str, Metric]:
    """Trains on all rows, one optimizer step per mini-batch; returns the metrics, the engine's own
    under `prefix`.

    `part` (i, k): the rows are the i-th of k equal parts of a training step, whose metrics merge to
    those of the step. `beside`: other rows, of which each optimizer step adds a part's loss, with
    counts of its own. `check_steps` gets the number of optimizer steps before the first, and may
    raise.
    """
    number, num_parts = part
    stopwatch = Stopwatch(engine, rows, prefix, passes=3 * schedule.epochs)
    chunks = _mini_batches(rows, schedule, engine.sequence_parallel_size)
    check_steps(len(chunks) * schedule.epochs)
    losses = [(rows, loss)]
    plans = [_plan(rows, chunks, schedule, engine.sequence_parallel_size)]
    if beside:
        stopwatch.count(beside[0])
        other_chunks = _mini_batches(
            beside[0], schedule, engine.sequence_parallel_size, len(chunks)
        )
        if len(other_chunks) != len(chunks):
            raise ValueError(
                f"the rows of {len(other_chunks)} optimizer steps are given beside those of "
                f"{len(chunks)}: number both alike in the column mini_batch"
            )
        losses.append(beside)
        plans.append(_plan(beside[0], other_chunks, schedule, engine.sequence_parallel_size))
    metrics: list[dict[str, Metric]] = []
    norms = []
    lr = engine.lr
    with engine.on_device(train=True):
        for mini_batches in zip(*plans, strict=True):
            passes = [
                (*one, at)
                for one in zip(losses, mini_batches, strict=True)
                for at in one[1].micro_batches
            ]
            both = replace(
                mini_batches[0],
                share=engine.sequence_parallel_size / (len(passes) * dist.get_world_size()),
            )
            if not both.num_tokens:  # no row counts
                continue
            unread: list[MicroMetrics] = []
            for index, ((all_rows, loss), mini_batch, micro_batch) in enumerate(passes):
                micro_loss, micro_metrics = loss(
                    MicroBatch(all_rows.take(micro_batch), engine.device), mini_batch
                )
                engine.backward(micro_loss, is_last=index == len(passes) - 1)
                unread += [micro_metrics, {f"{prefix}/loss": DeviceMetric.loss(micro_loss, both)}]
            norms.append(engine.step())
            metrics += read_metrics(unread)
    engine.training_steps += number == num_parts
    finite = [norm for norm in norms if math.isfinite(norm)]
    metrics += [{f"{prefix}/grad_norm": Metric.mean(norm)} for norm in finite]
    num_skipped = len(norms) - len(finite) if dist.get_rank() == 0 else 0  # all ranks skip the same
    own = {f"{prefix}/lr": Metric.mean(lr), f"{prefix}/skipped_steps": Metric.sum(num_skipped)}
    return merge_metrics(
        [*metrics, own, memory_metrics(engine.device, prefix), stopwatch.metrics(num_parts)]
    )


def read_metrics(parts: Sequence[MicroMetrics]) -> list[dict[str, Metric]]:
    """Fetches the numbers of all metrics from the device in one transfer."""
    numbers = [
        number.double() for part in parts for metric in part.values() for number in metric.numbers
    ]
    read = iter(to_host(torch.stack(numbers)).tolist())
    return [
        {
            name: metric.finish(*(next(read) for _ in metric.numbers))
            for name, metric in part.items()
        }
        for part in parts
    ]


def memory_metrics(device: str, prefix: str) -> dict[str, Metric]:
    """The most memory any rank has held so far, in GB (10^9 bytes)."""
    if device == "cuda":
        return {
            f"{prefix}/perf/max_memory_allocated_gb": Metric.max(
                torch.cuda.max_memory_allocated() / 1e9
            )
        }
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {f"{prefix}/perf/cpu_memory_used_gb": Metric.max(kibibytes * 1024 / 1e9)}


def _mini_batches(
    rows: Rows, schedule: UpdateSchedule, sequence_parallel_size: int, count: int | None = None
) -> list[torch.Tensor]:
    """This rank's samples of each optimizer step of an epoch; as many steps on every rank, some
    maybe without samples.

    The column `mini_batch` numbers the steps. Without it the samples of each rank are divided into
    `count` equal parts, by default as many as `num_mini_batch_samples` makes of those of all ranks.
    """
    first_rows = rows.sample_starts[:-1]
    num_samples = len(first_rows)
    if "mini_batch" in rows:
        number_S = rows["mini_batch"][first_rows]
        (num_steps,) = _most_of_any_rank([int(number_S.max()) + 1 if num_samples else 1])
        return [(number_S == step).nonzero().squeeze(1) for step in range(num_steps)]
    if count is None:
        num_all_samples = torch.tensor(num_samples)
        dist.all_reduce(num_all_samples)
        trainer = JointTrainer.of_process()
        num_of_step = (
            schedule.num_mini_batch_samples
            * sequence_parallel_size
            * (trainer.count if trainer else 1)
        )
        count = math.ceil(num_all_samples.item() / num_of_step)
    return list(torch.arange(num_samples).tensor_split(max(1, count)))


def _plan(
    rows: Rows,
    chunks: Sequence[torch.Tensor],
    schedule: UpdateSchedule,
    sequence_parallel_size: int,
) -> list[MiniBatch]:
    """The mini-batches of all epochs with their counts. Each row is on `sequence_parallel_size`
    ranks and counts once."""
    micro_batches = _micro_batches(rows, chunks, schedule.micro_batching, sequence_parallel_size)
    tokens_S = _sums(rows.num_scored_B, rows.sample_starts).double()
    counts = torch.stack(
        [torch.stack([tokens_S[chunk].sum(), (tokens_S[chunk] > 0).sum()]) for chunk in chunks]
    )
    dist.all_reduce(counts)
    counts /= sequence_parallel_size
    return [
        MiniBatch(
            own,
            tokens,
            sequences,
            share=sequence_parallel_size / (len(own) * dist.get_world_size()),
            response_length=rows.known_response_length,
        )
        for own, (tokens, sequences) in zip(micro_batches, counts.tolist(), strict=True)
    ] * schedule.epochs


def _micro_batches(
    rows: Rows,
    chunks: Sequence[torch.Tensor],
    micro_batching: MicroBatching,
    sequence_parallel_size: int,
    group: dist.ProcessGroup | None = None,
) -> list[list[torch.Tensor]]:
    """The rows of the micro-batches of each chunk of this rank's samples: as many as on every other
    rank of the group, by default of all ranks, and none above its budget.

    Every rank computes and communicates in each pass, so those that need fewer make as many as the
    one that needs most, the last ones without samples where there are too few. Ranks that share
    sequences hold that many budgets.
    """
    starts = rows.sample_starts
    if micro_batching.by_tokens:
        max_tokens = micro_batching.max_tokens * sequence_parallel_size
        lengths_S = _sums(rows.lengths_B, starts)
        # A sample of several rows that is longer has a pass of its own
        if len(lengths_S) < len(rows):
            lengths_S = lengths_S.clamp(max=max_tokens)
        lengths = [lengths_S[chunk].tolist() for chunk in chunks]
        pack = partial(pack_into_micro_batches, max_tokens=max_tokens)
        counts = _most_of_any_rank([max(1, len(pack(of_chunk))) for of_chunk in lengths], group)
        micro_batches = [
            [chunk[micro_batch] for micro_batch in pack(of_chunk, at_least=count)]
            for chunk, of_chunk, count in zip(chunks, lengths, counts, strict=True)
        ]
    else:
        micro_batches = [list(chunk.split(micro_batching.num_rows)) for chunk in chunks]
        counts = _most_of_any_rank([len(of_chunk) for of_chunk in micro_batches], group)
    filled = [
        of_chunk + [torch.arange(0)] * (count - len(of_chunk))
        for of_chunk, count in zip(micro_batches, counts, strict=True)
    ]
    return [[_rows_of(samples, starts) for samples in of_chunk] for of_chunk in filled]


def _sums(values_B: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The sums over the rows of each sample, of integers."""
    before = F.pad(values_B.cumsum(0), (1, 0))
    return before[starts[1:]] - before[starts[:-1]]


def _rows_of(samples: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The row numbers of some samples, one sample after the other."""
    num_rows = starts.diff()[samples]
    before = num_rows.cumsum(0) - num_rows
    return torch.repeat_interleave(starts[:-1][samples] - before, num_rows) + torch.arange(
        int(num_rows.sum())
    )


def _most_of_any_rank(counts: list[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Each count, as it is on the rank where it is largest; a collective call of the group, by
    default of all ranks."""
    largest = torch.tensor(counts)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()
