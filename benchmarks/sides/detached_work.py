"""The samples of the benchmark `detached`: a prompt with 8 responses in 7 columns, equal on all
sides."""

from collections.abc import Sequence

import numpy as np

from benchmarks.sides.dispatch_batch import BYTES_PER_TOKEN, columns

NUM_MADE = 128
PASSES = 4
BATCH = 64
NUM_SAMPLES = PASSES * NUM_MADE  # that are passed on
ROWS = 8
LENGTH = 3276
SAMPLE_BYTES = int(ROWS * LENGTH * BYTES_PER_TOKEN)  # 0.9 MiB


def samples(seed: int) -> list[dict[str, np.ndarray]]:
    """Columns of (ROWS, LENGTH), or half as long, each with values of its own."""
    return [columns(ROWS, LENGTH, NUM_MADE * seed + index) for index in range(NUM_MADE)]


def sums(batch: dict[str, np.ndarray]) -> np.ndarray:
    """(BATCH, 7) sums of every 61st value of the columns of each sample: a little beside the time
    that is measured."""
    flat = [column.reshape(BATCH, -1)[:, ::61] for _, column in sorted(batch.items())]
    return np.stack([column.sum(-1, dtype=np.float64) for column in flat], axis=-1)


def in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """(NUM_SAMPLES, 7) all sums in ascending order, because samples need not arrive in the order in
    which they left."""
    found = np.concatenate(parts)
    return found[np.lexsort(found.T)]
