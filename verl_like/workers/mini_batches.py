"""Turns one rank's rows into micro-batches: for forward passes, and for optimizer steps exact over all ranks."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from verl_like.algorithms.aggregation import Aggregate, agg_loss
from verl_like.protocol import PAD_COLUMN, DataProto, Metric, merge_metrics
from verl_like.workers.engine import TrainingEngine

# Legend: B rows of this rank, R response length.

Rows = dict[str, torch.Tensor]
"""Some rows of a batch by column, on the engine's device."""


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step on this rank, and their counts over all ranks."""

    rows: torch.Tensor
    """(b,) int64, indices of this rank's rows."""
    num_tokens: float
    """Response tokens that count, over all ranks."""
    num_sequences: float
    """Rows with at least one such token, over all ranks."""
    share: float
    """1 / number of mini-batches of the update: a loss times it adds up to the mean over mini-batches."""

    def aggregate(self, loss_agg_mode: str) -> Aggregate:
        """`agg_loss` over this mini-batch: micro-batches and ranks add up to its exact loss."""
        return partial(
            agg_loss,
            loss_agg_mode=loss_agg_mode,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
        )


@dataclass(frozen=True)
class UpdateSchedule:
    """How a rank's rows become optimizer steps."""

    mini_batch_rows: int
    """Rows of this rank in one optimizer step."""
    micro_batch_rows: int
    """Rows of this rank in one forward and backward pass."""
    epochs: int
    """Passes over the rows."""


MicroLoss = Callable[[Rows, MiniBatch], tuple[torch.Tensor, dict[str, Metric]]]
"""(rows of a micro-batch, its mini-batch) -> the micro-batch's share of the loss, and its metrics."""


def per_rank_rows(prompts: int, samples_per_prompt: int, world_size: int, key: str) -> int:
    """Rows of one rank in a mini-batch of `prompts` prompts.

    Raises:
        ValueError: the rows do not divide by the ranks; `key` names the setting.
    """
    rows = prompts * samples_per_prompt
    if rows % world_size:
        raise ValueError(
            f"{key}={prompts} prompts x {samples_per_prompt} samples = {rows} rows do not divide by the {world_size} "
            f"ranks; set it so that the rows are a multiple of {world_size}."
        )
    return rows // world_size


def rank_order(num_rows: int, mini_batch_rows: int, world_size: int) -> torch.Tensor:
    """(num_rows,) int64: the order in which equal shards make up the same mini-batches for every number of ranks.

    The driver orders a batch like this before an update. Mini-batch i is then rows i * mini_batch_rows to
    (i + 1) * mini_batch_rows of the batch as it was, an equal share of them on every rank.

    Raises:
        ValueError: rows do not divide by `mini_batch_rows`, or those not by `world_size`.
    """
    if num_rows % mini_batch_rows or mini_batch_rows % world_size:
        raise ValueError(
            f"{num_rows} rows in mini-batches of {mini_batch_rows} do not split evenly over {world_size} ranks; "
            "choose a ppo_mini_batch_size that divides data.train_batch_size and, times rollout.n, by the ranks."
        )
    share = mini_batch_rows // world_size
    return torch.arange(num_rows).view(-1, world_size, share).transpose(0, 1).flatten()


def to_rows(data: DataProto, device: str) -> Rows:
    """The batch's tensors on the device; padding rows lose their response tokens, so that they count nowhere."""
    rows = {name: column.to(device) for name, column in data.batch.items()}
    if PAD_COLUMN in rows:
        rows["response_mask"] = rows["response_mask"] * ~rows[PAD_COLUMN].unsqueeze(-1)
    return rows


def forward(
    engine: TrainingEngine, rows: Rows, micro_batch_rows: int, run: Callable[[Rows], tuple[torch.Tensor, ...]]
) -> list[torch.Tensor]:
    """Runs a model over all rows without gradients; `run` maps a micro-batch to tensors with one entry per row."""
    with engine.on_device():
        outputs = [run(micro) for micro in _split(rows, torch.arange(len(rows["input_ids"])), micro_batch_rows)]
    return [torch.cat(column).cpu() for column in zip(*outputs, strict=True)]


def update(
    engine: TrainingEngine, rows: Rows, schedule: UpdateSchedule, loss: MicroLoss, prefix: str
) -> dict[str, Metric]:
    """Trains on all rows, one optimizer step per mini-batch; returns the metrics, the engine's own under `prefix`."""
    metrics: list[dict[str, Metric]] = []
    steps = []
    lr = engine.lr
    with engine.on_device(train=True):
        for mini_batch in _plan(rows, schedule, engine.sequence_parallel_size):
            micro_batches = list(_split(rows, mini_batch.rows, schedule.micro_batch_rows))
            for index, micro in enumerate(micro_batches):
                micro_loss, micro_metrics = loss(micro, mini_batch)
                engine.backward(micro_loss, is_last=index == len(micro_batches) - 1)
                metrics += [micro_metrics, {f"{prefix}/loss": Metric.sum(micro_loss.item() * mini_batch.share)}]
            steps.append(engine.step())
    engine.training_steps += 1
    metrics += [{f"{prefix}/grad_norm": Metric.mean(step.grad_norm)} for step in steps if not step.skipped]
    own = {
        f"{prefix}/lr": Metric.mean(lr),
        f"{prefix}/skipped_steps": Metric.max(sum(step.skipped for step in steps)),
    }
    return merge_metrics([*metrics, own, memory_metrics(engine.device, prefix)])


def token_mean(total: float | torch.Tensor, num_tokens: int) -> Metric:
    """The mean of a quantity summed over `num_tokens` tokens; it stays a mean over all tokens when merged."""
    return Metric.mean(float(total) / max(num_tokens, 1), weight=num_tokens)


def memory_metrics(device: str, prefix: str) -> dict[str, Metric]:
    """The most memory any rank has held so far, in GB (10^9 bytes)."""
    if device == "cuda":
        return {f"{prefix}/perf/max_memory_allocated_gb": Metric.max(torch.cuda.max_memory_allocated() / 1e9)}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {f"{prefix}/perf/cpu_memory_used_gb": Metric.max(kibibytes * 1024 / 1e9)}


def _plan(rows: Rows, schedule: UpdateSchedule, holders: int) -> list[MiniBatch]:
    """The mini-batches of all epochs with their counts; those without any token on any rank are left out.

    Each row is on `holders` ranks and counts once.
    """
    one_epoch = torch.arange(len(rows["input_ids"])).split(schedule.mini_batch_rows)
    chunks = list(one_epoch) * schedule.epochs
    tokens_B = rows["response_mask"].sum(-1).double()
    counts = torch.stack([torch.stack([tokens_B[chunk].sum(), (tokens_B[chunk] > 0).sum()]) for chunk in chunks])
    dist.all_reduce(counts)
    counts /= holders
    used = [(chunk, *count) for chunk, count in zip(chunks, counts.tolist(), strict=True) if count[0] > 0]
    return [MiniBatch(chunk, tokens, sequences, 1 / len(used)) for chunk, tokens, sequences in used]


def _split(rows: Rows, indices: torch.Tensor, size: int) -> Iterator[Rows]:
    for chunk in indices.split(size):
        yield {name: column[chunk] for name, column in rows.items()}
