"""The mini-batch of the benchmark `packing`: 32 sequences of log-normal lengths, padded on the
right."""

import numpy as np

from benchmarks.harness import sized

PROMPT = 16
VOCABULARY = 512
ROWS, LONGEST = sized((32, 512), (4, 64))


def columns() -> dict[str, np.ndarray]:
    """`input_ids` and `attention_mask` (32, 512) int64; each row has 16 tokens of prompt, and one
    row is full."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(120), 0.8, ROWS).astype(int), PROMPT + 1, LONGEST)
    lengths[0] = LONGEST
    mask = (np.arange(LONGEST) < lengths[:, None]).astype(np.int64)
    return {
        "input_ids": generator.integers(2, VOCABULARY, mask.shape) * mask,
        "attention_mask": mask,
    }
