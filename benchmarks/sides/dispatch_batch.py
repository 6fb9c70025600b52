"""The batches of the benchmarks `dispatch`, `calls` and `scaling`: 7 columns of RL, equal on all
sides."""

import numpy as np

# name -> (type, whether it covers prompt and response or, half as long, one of them)
COLUMNS = {
    "input_ids": (np.int64, 1.0),
    "attention_mask": (np.int64, 1.0),
    "position_ids": (np.int64, 1.0),
    "prompts": (np.int64, 0.5),
    "responses": (np.int64, 0.5),
    "old_log_probs": (np.float32, 0.5),
    "advantages": (np.float32, 0.5),
}
BYTES_PER_TOKEN = sum(np.dtype(kind).itemsize * share for kind, share in COLUMNS.values())  # 36
REPLY_BYTES_PER_TOKEN = 2  # the fp32 column that comes back


def columns(rows: int, length: int, step: int) -> dict[str, np.ndarray]:
    """(rows, length) or (rows, length / 2) each, in new memory; the values depend on the step, so
    that nobody can return an earlier result."""
    base = np.arange(rows * length, dtype=np.int32).reshape(rows, length) % 65_521
    return {
        name: (base[:, : int(length * share)] + (step + index)).astype(kind)
        for index, (name, (kind, share)) in enumerate(COLUMNS.items())
    }


def ragged_lengths(rows: int, longest: int) -> np.ndarray:
    """(rows,) even, log-normal lengths, of which one is the longest."""
    draws = np.random.default_rng(0).lognormal(0.0, 0.8, rows)
    return 2 * np.maximum(1, draws / draws.max() * longest / 2).astype(np.int64)
