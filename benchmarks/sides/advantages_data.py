"""The batch that both sides of `advantages` work on, from a seed."""

import numpy as np

GAMMA, LAM = 0.99, 0.95
SAMPLES_PER_PROMPT = 8


def batch(rows: int, length: int, holes: bool) -> dict[str, np.ndarray]:
    """(rows, length) float32 columns and an int64 mask: responses of a quarter to the full length, whose reward is on
    the last token for `outcome` and on every token for `rewards`; with holes, a fifth of the tokens are not the
    policy's, in runs of 16."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 4, length + 1, (rows, 1))
    mask = np.arange(length) < lengths
    if holes:
        mask &= np.repeat(rng.random((rows, length // 16)) < 0.8, 16, axis=1)

    def normal(scale: float) -> np.ndarray:
        return rng.standard_normal((rows, length), dtype=np.float32) * np.float32(scale)

    last = mask & (mask[:, ::-1].cumsum(1)[:, ::-1] == 1)
    old_log_prob = normal(1.0) - 2
    return {
        "mask": mask.astype(np.int64),
        "rewards": np.where(mask, normal(0.1), 0),
        "outcome": np.where(last, normal(1.0), 0),
        "values": normal(1.0),
        "advantages": normal(1.0),
        "old_log_prob": old_log_prob,
        "log_prob": old_log_prob + normal(0.2),
        "index": np.repeat(np.arange(rows // SAMPLES_PER_PROMPT), SAMPLES_PER_PROMPT).astype(str),
    }
