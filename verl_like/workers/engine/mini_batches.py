"""Runs a model over the rows of a rank, in micro-batches: forward alone, or to train it.

The loss and the metrics of an optimizer step do not depend on how its rows are divided into
micro-batches and over ranks.
"""

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.algorithms.aggregation import Aggregate, BatchCounts, agg_loss
from verl_like.algorithms.masked import masked_sum
from verl_like.protocol import Metric, merge_metrics
from verl_like.protocol.row_ops import (
    RowTaker,
    jagged_from_lengths,
    offsets_of,
    places_from,
    row_lengths,
)
from verl_like.workers.engine.base import TrainingEngine
from verl_like.workers.engine.mesh import num_trainers, own_ranks
from verl_like.workers.engine.micro_batch import MicroBatch
from verl_like.workers.engine.throughput import Stopwatch
from verl_like.workers.models.packing import Rows, sums_between
from verl_like.workers.models.shared_prompts import first_rows_of_prompts
from verl_like.workers.pinned_memory import to_host
from verl_like.workers.planning.partition import (
    MicroBatching,
    pack_into_micro_batches,
    pack_prompts,
)

# Legend: B rows of this rank, R response length; of a micro-batch b rows, K response tokens, N
# tokens.

_SEQUENCE_DIMS = 3
"""The dimensions of what a pass returns for all tokens of prompts and responses."""


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step on this rank, and their counts over all ranks."""

    micro_batches: list[Tensor]
    """The indices of this rank's rows in each micro-batch, (b,) int64. Every rank has the same
    number of micro-batches."""
    num_tokens: float
    """The number of response tokens that count, over all ranks."""
    num_sequences: float
    """The number of samples with at least one such token, over all ranks."""
    share: float
    """1 / the number of its micro-batches, over all ranks that return results. Of the ranks that
    share sequences the first returns them."""
    response_length: int | None
    """R, if the batch says it."""

    def aggregate(self, loss_agg_mode: str) -> Aggregate:
        """Returns `agg_loss` with the counts of this mini-batch.

        Its results of the micro-batches of all ranks add up to the loss of the mini-batch.
        """
        return partial(agg_loss, loss_agg_mode=loss_agg_mode, **self.global_batch_info)

    @property
    def counts(self) -> BatchCounts:
        """The counts by which a loss is divided.

        The engine adds gradients over ranks instead of averaging them, so `dp_size` is 1.
        """
        return BatchCounts(
            batch_num_tokens=self.num_tokens,
            global_batch_size=self.num_sequences,
            loss_scale_factor=self.response_length,
        )

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """The counts as arguments of `agg_loss`."""
        return self.counts.arguments


@dataclass(frozen=True)
class UpdateSchedule:
    """How rows are divided into optimizer steps."""

    num_mini_batch_samples: int
    """The number of samples of an optimizer step, over all ranks of a trainer. A batch with the
    column `mini_batch` does not use it."""
    micro_batching: MicroBatching
    """How the samples of a step are divided into forward and backward passes."""
    epochs: int
    """The number of passes over the rows."""


@dataclass(frozen=True)
class DeviceMetric:
    """A metric whose numbers are still on the device.

    Fetching them waits for all work of the device, so `read_metrics` fetches many at once.
    """

    numbers: tuple[Tensor, ...]
    """Scalars, without their graph."""
    finish: Callable[..., Metric]
    """A function that makes the metric from the numbers, as floats."""

    @classmethod
    def loss(cls, value: Tensor, mini_batch: MiniBatch) -> "DeviceMetric":
        """Makes the metric of what a micro-batch adds to the loss of its mini-batch.

        Merged, such metrics are the mean of the losses of all mini-batches.
        """
        share = mini_batch.share

        def mean(number: float) -> Metric:
            return Metric.mean(number / share, weight=share)

        return cls((value.detach(),), mean)

    @classmethod
    def max(cls, value: Tensor) -> "DeviceMetric":
        """Makes a metric that is the largest of its values when merged."""
        return cls((value.detach(),), Metric.max)

    @classmethod
    def token_mean(cls, total: Tensor, num_tokens: Tensor) -> "DeviceMetric":
        """Makes the metric of a mean over tokens from a sum and the number of tokens.

        Merged, such metrics are the mean over all tokens. A metric without tokens is 0 with weight
        0, so it does not count.
        """
        return cls((total.detach(), num_tokens), Metric.mean_of)

    @classmethod
    def of(cls, name: str, value: Tensor | float, mask_BR: Tensor) -> "DeviceMetric":
        """Makes the metric `name` from what a loss reports of a micro-batch.

        `value` is a value for each token (B, R) or for each row (B,), or one number, which is a
        mean over tokens. Rows without tokens do not count. Raises ValueError for a tensor of
        another shape.
        """
        num_tokens = mask_BR.sum()
        if not isinstance(value, Tensor):
            return cls((num_tokens,), partial(Metric.mean, value))
        detached = value.detach()
        if value.ndim == 0:
            return cls((detached, num_tokens), Metric.mean)
        has_tokens_B = mask_BR.bool().any(-1)
        for mask in (mask_BR, has_tokens_B):
            if value.shape == mask.shape:
                total = masked_sum(detached.float(), mask)
                return cls.token_mean(total, mask.sum())
        raise ValueError(
            f"the metric {name} of a loss has shape {tuple(value.shape)} for rows of shape "
            f"{tuple(mask_BR.shape)}: return a value by token (B, R), by row (B,), or one number"
        )


MicroMetrics = dict[str, DeviceMetric]

MicroPass = Callable[[MicroBatch], tuple[Tensor, ...]]
"""A function that runs the model over a micro-batch, and returns what it computes."""
MicroLoss = Callable[[MicroBatch, MiniBatch], tuple[Tensor, MicroMetrics]]
"""A function of a micro-batch and its mini-batch. It returns what the former adds to the loss of
the latter, and metrics."""


def forward(
    engine: TrainingEngine,
    rows: Rows,
    micro_batching: MicroBatching,
    run: MicroPass,
    *,
    by_token: bool = True,
) -> list[Tensor]:
    """Runs a model over all rows without gradients, and returns what it computes, on the host.

    `run` maps a micro-batch of b rows to tensors, which become one column each, in the order of the
    rows. With `by_token` a tensor has a value for each response token, (K,) or padded (b, R), and
    the column is jagged. Otherwise it has one entry for each row. A tensor of three dimensions has
    entries for all tokens of prompts and responses, (N, ...), and its column is jagged, too.

    The ranks of this worker group alone take part, without other trainers of the model.
    """
    num_samples = len(rows.sample_starts) - 1
    all_samples = torch.arange(num_samples)
    (micro_batches,) = _micro_batches(
        rows, [all_samples], micro_batching, engine.sequence_parallel_size, group=own_ranks()
    )
    outputs = []
    with engine.on_device():
        for at in micro_batches:
            micro = MicroBatch(rows.take(at), engine.device)
            results = run(micro)
            kept = []
            for each in results:
                # A pass without rows has run filler rows, whose results are dropped.
                if each.ndim == _SEQUENCE_DIMS:
                    kept.append(each[: int(rows.lengths_B[at].sum())])
                elif by_token:
                    kept.append(micro.of_tokens(each))
                else:
                    kept.append(each[: len(at)])
            outputs.append(kept)
    order = torch.cat(micro_batches)
    columns = []
    for values in zip(*outputs, strict=True):
        column = to_host(torch.cat(values))
        if column.ndim == _SEQUENCE_DIMS:
            column = jagged_from_lengths(column, rows.lengths_B[order])
        elif by_token:
            column = jagged_from_lengths(column, row_lengths(rows["responses"])[order])
        columns.append(column)
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
    """Trains on all rows, with one optimizer step per mini-batch, and returns the metrics.

    Args:
        engine: the engine of the model.
        rows: this rank's rows.
        schedule: how the rows are divided.
        loss: computes the loss of a micro-batch.
        prefix: of the names of metrics that every role has, such as the learning rate.
        part: (i, k) if the rows are the i-th of k equal parts of a training step. The metrics of
            the parts merge to those of the step.
        beside: other rows and their loss. Each optimizer step adds the loss of a part of them,
            which has its own counts.
        check_steps: gets the number of optimizer steps before the first one, and may raise.
    """
    number, num_parts = part
    sequence_parallel_size = engine.sequence_parallel_size
    stopwatch = Stopwatch(engine, rows, prefix, passes=3, epochs=schedule.epochs)
    chunks = _mini_batches(rows, schedule, sequence_parallel_size)
    check_steps(len(chunks) * schedule.epochs)
    losses = [(rows, loss)]
    plans = [_plan(rows, chunks, schedule, sequence_parallel_size)]
    if beside:
        others, _ = beside
        stopwatch.count(others)
        other_chunks = _mini_batches(others, schedule, sequence_parallel_size, len(chunks))
        if len(other_chunks) != len(chunks):
            raise ValueError(
                f"the rows of {len(other_chunks)} optimizer steps are given beside those of "
                f"{len(chunks)}: number both alike in the column mini_batch"
            )
        losses.append(beside)
        plans.append(_plan(others, other_chunks, schedule, sequence_parallel_size))
    metrics: list[dict[str, Metric]] = []
    norms = []
    lr = engine.lr
    with engine.on_device(train=True):
        for mini_batches in zip(*plans, strict=True):
            passes = []
            for (all_rows, loss), mini_batch in zip(losses, mini_batches, strict=True):
                for at in mini_batch.micro_batches:
                    passes.append((all_rows, loss, mini_batch, at))
            share = _share_of_pass(len(passes), sequence_parallel_size)
            whole_step = replace(mini_batches[0], share=share)
            if not whole_step.num_tokens:  # no row counts
                continue
            unread = []
            for number_of_pass, (all_rows, loss, mini_batch, at) in enumerate(passes, start=1):
                micro = MicroBatch(all_rows.take(at), engine.device)
                stopwatch.leave_out_shared(micro.on_host)
                micro_loss, micro_metrics = loss(micro, mini_batch)
                engine.backward(micro_loss, is_last=number_of_pass == len(passes))
                unread.append(micro_metrics)
                unread.append({f"{prefix}/loss": DeviceMetric.loss(micro_loss, whole_step)})
            norms.append(engine.step())
            metrics += read_metrics(unread)
    if number == num_parts:
        engine.training_steps += 1
    num_skipped = 0
    for norm in norms:
        if math.isfinite(norm):
            metrics.append({f"{prefix}/grad_norm": Metric.mean(norm)})
        elif dist.get_rank() == 0:  # all ranks skip the same steps, and one counts them
            num_skipped += 1
    metrics += [
        {f"{prefix}/lr": Metric.mean(lr), f"{prefix}/skipped_steps": Metric.sum(num_skipped)},
        memory_metrics(engine.device, prefix),
        stopwatch.metrics(num_parts),
    ]
    return merge_metrics(metrics)


def read_metrics(parts: Sequence[MicroMetrics]) -> list[dict[str, Metric]]:
    """Fetches the numbers of all metrics from the device in one transfer, and makes the metrics."""
    numbers: list[Tensor] = []
    for part in parts:
        for metric in part.values():
            numbers += metric.numbers
    doubles = [number.double() for number in numbers]
    on_host = to_host(torch.stack(doubles))
    read = iter(on_host.tolist())
    finished = []
    for part in parts:
        metrics = {}
        for name, metric in part.items():
            numbers_of_metric = islice(read, len(metric.numbers))
            metrics[name] = metric.finish(*numbers_of_metric)
        finished.append(metrics)
    return finished


def memory_metrics(device: str, prefix: str) -> dict[str, Metric]:
    """Returns the most memory that any rank has used so far, in GB (10^9 bytes)."""
    if device == "cuda":
        gigabytes = torch.cuda.max_memory_allocated() / 1e9
        return {f"{prefix}/perf/max_memory_allocated_gb": Metric.max(gigabytes)}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gigabytes = kibibytes * 1024 / 1e9
    return {f"{prefix}/perf/cpu_memory_used_gb": Metric.max(gigabytes)}


def _mini_batches(
    rows: Rows, schedule: UpdateSchedule, sequence_parallel_size: int, count: int | None = None
) -> list[Tensor]:
    """Returns this rank's samples of each optimizer step of an epoch.

    Every rank has the same number of steps, of which some may have none of its samples. The column
    `mini_batch` has the number of each sample's step. Without it, the samples of each rank are
    divided into `count` equal parts. By default that is the number of steps of
    `num_mini_batch_samples` that the samples of all ranks fill.
    """
    first_rows = rows.sample_starts[:-1]
    num_samples = len(first_rows)
    if "mini_batch" in rows:
        number_S = rows["mini_batch"][first_rows]
        last_step = int(number_S.max()) if num_samples else 0
        (num_steps,) = _most_of_any_rank([last_step + 1])
        samples_of_steps = []
        for step in range(num_steps):
            (samples,) = torch.where(number_S == step)
            samples_of_steps.append(samples)
        return samples_of_steps
    if count is None:
        num_all_samples = torch.tensor(num_samples)
        dist.all_reduce(num_all_samples)
        # A sample counts once for each rank that has it.
        num_of_step = schedule.num_mini_batch_samples * sequence_parallel_size * num_trainers()
        count = math.ceil(num_all_samples.item() / num_of_step)
    samples = torch.arange(num_samples)
    return list(samples.tensor_split(max(1, count)))


def _plan(
    rows: Rows, chunks: Sequence[Tensor], schedule: UpdateSchedule, sequence_parallel_size: int
) -> list[MiniBatch]:
    """Returns the mini-batches of all epochs, with their counts over all ranks.

    Each row is on `sequence_parallel_size` ranks and counts once.
    """
    micro_batches = _micro_batches(rows, chunks, schedule.micro_batching, sequence_parallel_size)
    num_tokens_S = sums_between(rows.num_scored_B, rows.sample_starts)
    own_counts = []
    for chunk in chunks:
        tokens = num_tokens_S[chunk].double()
        num_sequences = (tokens > 0).sum()
        own_count = torch.stack([tokens.sum(), num_sequences])
        own_counts.append(own_count)
    counts = torch.stack(own_counts)
    dist.all_reduce(counts)
    counts /= sequence_parallel_size
    mini_batches = []
    for own, of_step in zip(micro_batches, counts.tolist(), strict=True):
        num_tokens, num_sequences = of_step
        share = _share_of_pass(len(own), sequence_parallel_size)
        length = rows.known_response_length
        mini_batch = MiniBatch(own, num_tokens, num_sequences, share, length)
        mini_batches.append(mini_batch)
    return mini_batches * schedule.epochs


def _share_of_pass(num_passes: int, sequence_parallel_size: int) -> float:
    """Returns `MiniBatch.share` for a number of passes on each rank."""
    return sequence_parallel_size / (num_passes * dist.get_world_size())


def _micro_batches(
    rows: Rows,
    chunks: Sequence[Tensor],
    micro_batching: MicroBatching,
    sequence_parallel_size: int,
    group: dist.ProcessGroup | None = None,
) -> list[list[Tensor]]:
    """Divides each chunk of this rank's samples into micro-batches, and returns their rows.

    The ranks of the group, by default all ranks, communicate in each pass. So each of them gets as
    many micro-batches of a chunk as the rank that needs most; the last ones have no rows if there
    are too few samples. Micro-batches keep to the limit of tokens or rows. Ranks that share
    sequences share the tokens of a micro-batch, so it may have the limit of all of them together.
    """
    starts = rows.sample_starts
    if micro_batching.by_tokens:
        max_tokens = micro_batching.max_tokens * sequence_parallel_size
        lengths_S = sums_between(rows.lengths_B, starts)
        # A sample of several rows may exceed the limit. It then has a micro-batch of its own.
        if len(lengths_S) < len(rows):
            lengths_S = lengths_S.clamp(max=max_tokens)
        prompts_S = None
        if rows.shares_prompts:
            prompts_S = first_rows_of_prompts(rows["prompts"])[starts[:-1]]

        def pack(chunk: Tensor, at_least: int = 1) -> list[Tensor]:
            lengths = lengths_S[chunk].tolist()
            if prompts_S is None:
                packed = pack_into_micro_batches(lengths, max_tokens, at_least=at_least)
            else:
                prompts = prompts_S[chunk].tolist()
                packed = pack_prompts(lengths, prompts, max_tokens, at_least=at_least)
            return [chunk[places] for places in packed]

        own_counts = [max(1, len(pack(chunk))) for chunk in chunks]
        counts = _most_of_any_rank(own_counts, group)
        micro_batches = []
        for chunk, count in zip(chunks, counts, strict=True):
            passes = pack(chunk, at_least=count)
            micro_batches.append(passes)
    else:
        micro_batches = [list(chunk.split(micro_batching.num_rows)) for chunk in chunks]
        own_counts = [len(passes) for passes in micro_batches]
        counts = _most_of_any_rank(own_counts, group)
    rows_of_chunks = []
    for passes, count in zip(micro_batches, counts, strict=True):
        num_empty = count - len(passes)
        passes += [torch.arange(0)] * num_empty
        rows_of_passes = [_rows_of(samples, starts) for samples in passes]
        rows_of_chunks.append(rows_of_passes)
    return rows_of_chunks


def _rows_of(samples: Tensor, starts: Tensor) -> Tensor:
    """Returns the row numbers of some samples, one sample after the other."""
    num_rows = starts.diff()[samples]
    return places_from(starts[samples], offsets_of(num_rows))


def _most_of_any_rank(counts: list[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the largest value of each count over the ranks of a group, by default all ranks.

    All ranks of the group must call it.
    """
    largest = torch.tensor(counts)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()
