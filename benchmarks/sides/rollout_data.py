"""Prompts and lengths of the benchmark `rollout`, the same on both sides."""

import numpy as np

from benchmarks.harness import sized

PROMPT_LENGTH = 32
NUM_PROMPTS, LONGEST, MEAN_LENGTH = sized((64, 318, 80), (8, 24, 8))
VOCABULARY, FIRST_TOKEN = 2048, 2  # after <pad> and <eos>


def prompts(seed: int) -> list[list[int]]:
    random = np.random.default_rng([seed, 0])
    return random.integers(FIRST_TOKEN, VOCABULARY, size=(NUM_PROMPTS, PROMPT_LENGTH)).tolist()


def lengths(seed: int) -> list[int]:
    """Tokens of each response: log-normal, scaled to a mean of 80 and a longest of 318."""
    values = np.random.default_rng([seed, 1]).lognormal(sigma=0.8, size=NUM_PROMPTS)
    values = np.minimum(values * MEAN_LENGTH / values.mean(), LONGEST)
    values[values.argmax()] = LONGEST
    others = values < LONGEST
    values[others] *= (MEAN_LENGTH * NUM_PROMPTS - values[~others].sum()) / values[others].sum()
    return np.clip(values.round(), 1, LONGEST).astype(int).tolist()
