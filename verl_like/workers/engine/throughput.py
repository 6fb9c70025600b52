"""Measures the speed of a pass over a batch: tokens per second, and MFU (model FLOPs utilization,
arXiv:2204.02311), the share of the device's peak."""

import time
from functools import lru_cache

import torch

from verl_like.protocol import PAD_COLUMN, Metric
from verl_like.workers.engine.base import TrainingEngine
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.shared_prompts import first_rows_of_prompts, num_shared_tokens

_DENSE_BFLOAT16_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""The FLOP/s of matrix products without sparsity, by a part of the device's name."""


class Stopwatch:
    """Measures one pass over `rows`, from the construction of the Stopwatch to `metrics`.

    `phase` names the pass in the metrics. Its cost is `passes` forward passes: 1 for inference and
    3 for training, because a backward pass costs two; times the number of epochs. Padding does not
    count, nor do recomputed layers and the optimizer. The head counts for response tokens alone,
    and attention within a sequence alone. If rows share prompts, `leave_out_shared` takes each
    micro-batch; tokens of a prompt still count for each row that has it.
    """

    def __init__(
        self, engine: TrainingEngine, rows: Rows, phase: str, *, passes: int, epochs: int = 1
    ) -> None:
        self.engine = engine
        self.phase = phase
        self.passes = passes
        self.epochs = epochs
        self.tokens = 0
        self.flops = 0.0
        self.count(rows)
        self.start = time.perf_counter()

    def count(self, rows: Rows) -> None:
        """Adds rows to what the pass computes: those it begins with, and those of a loss that is
        trained beside."""
        tokens_B = rows.lengths_B
        flops_B = self.engine.cost.forward(tokens_B, rows.num_scored_B)
        if PAD_COLUMN in rows:
            is_real_B = ~rows[PAD_COLUMN]
            tokens_B = tokens_B[is_real_B]
            flops_B = flops_B[is_real_B]
        self.tokens += int(tokens_B.sum())
        self.flops += self.passes * self.epochs * float(flops_B.sum())

    def leave_out_shared(self, rows: Rows) -> None:
        """Takes off the FLOPs of tokens that rows of a micro-batch share with other rows of it."""
        if not rows.shares_prompts:
            return
        first_rows_B = first_rows_of_prompts(rows["prompts"])
        shared_B = num_shared_tokens(rows, first_rows_B)
        no_scored_B = torch.zeros_like(shared_B)
        flops_B = self.engine.cost.forward(shared_B, no_scored_B)
        if PAD_COLUMN in rows:
            flops_B = flops_B[~rows[PAD_COLUMN]]
        self.flops -= self.passes * float(flops_B.sum())

    def metrics(self, num_parts: int = 1) -> dict[str, Metric]:
        """Ends the measurement, and returns `perf/tokens_per_s/<phase>` and `perf/mfu/<phase>`.

        The former is summed over ranks, and averaged over the `num_parts` parts of a training step.
        The latter is the mean over ranks and time. The host must have read what the pass computed
        last, so that the device has ended its work.
        """
        seconds = time.perf_counter() - self.start
        engine = self.engine
        peak_of_rank = peak_flops(engine.device, engine.dtype)
        peak = peak_of_rank * engine.sequence_parallel_size
        speed = self.tokens / seconds / num_parts
        utilization = self.flops / (seconds * peak)
        return {
            f"perf/tokens_per_s/{self.phase}": Metric.sum(speed),
            f"perf/mfu/{self.phase}": Metric.mean(utilization, weight=seconds),
        }


@lru_cache
def peak_flops(device: str, dtype: str) -> float:
    """Returns the FLOP/s of matrix products in `dtype`.

    For known GPUs in bfloat16 it is the number of the data sheet. Otherwise it is measured, once a
    process: the best of a few products, on a CPU with this process's threads. That takes less than
    0.2 s.
    """
    if device == "cuda" and dtype == "bfloat16":
        name = torch.cuda.get_device_name()
        for part, peak in _DENSE_BFLOAT16_PEAKS.items():
            if part in name:
                return peak
    size = 8192 if device == "cuda" else 768
    torch_dtype = getattr(torch, dtype)
    matrix = torch.ones(size, size, dtype=torch_dtype, device=device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
