"""Advantage estimators of verl_like and of verl's core_algos on the same batch, in one process."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn as estimator_of_verl

from benchmarks.serve import serve
from verl_like.algorithms.advantages import get_adv_estimator_fn
from verl_like.algorithms.advantages.gdpo import GDPOOptions

PROMPTS = 16
SAMPLES = 8
LENGTH = 96
GAMMA = 0.97
LAM = 0.9
SPREADS = {"correct": 1.0, "brief": 0.25}
WEIGHTS = [0.5, 2.0]
CONFIG_OF_VERL = AlgoConfig(
    gamma=GAMMA, lam=LAM, gdpo_reward_keys=list(SPREADS), gdpo_reward_weights=WEIGHTS
)
OPTIONS = {"gdpo": GDPOOptions(gdpo_reward_keys=tuple(SPREADS), gdpo_reward_weights=tuple(WEIGHTS))}
HOLES = [
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gdpo",
    "tir_optimal_token_baseline",
]


def differences(seed: int) -> dict[str, Any]:
    """By estimator, the largest difference of advantages and of returns on the response tokens. For
    the optimal token baseline the responses have no holes: verl finds the tail of the longest one
    by its number of tokens."""
    with_holes = batch(seed, holes=True)
    without = batch(seed, holes=False)
    found = {name: difference(name, with_holes) for name in HOLES}
    return found | {"optimal_token_baseline": difference("optimal_token_baseline", without)}


def batch(seed: int, holes: bool) -> dict[str, Any]:
    """Inputs of all estimators by name, the samples of a prompt shuffled into the others. No score
    is 0 and none equals another, where verl's GPG and Pass@k are defined otherwise."""
    rng = np.random.default_rng(seed)
    rows = PROMPTS * SAMPLES
    mask = np.arange(LENGTH) < rng.integers(LENGTH // 4, LENGTH + 1, (rows, 1))
    if holes:
        mask &= rng.random(mask.shape) < 0.8
    probability = rng.uniform(0.05, 0.95, mask.shape)

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(mask, values, 0).astype(np.float32))

    last = mask & (mask[:, ::-1].cumsum(1)[:, ::-1] == 1)
    # A prompt of one token
    attended = np.concatenate([np.ones((rows, 1)), last[:, ::-1].cumsum(1)[:, ::-1]], axis=1)
    scores = {
        name: np.where(last, rng.uniform(0.1, 1, (rows, 1)) * most, 0)
        for name, most in SPREADS.items()
    }
    return {
        "token_level_rewards": column(sum(scores.values()) + rng.normal(0, 1e-3, mask.shape)),
        "response_mask": torch.from_numpy(mask).long(),
        "index": rng.permutation(
            np.repeat([f"prompt {n}" for n in range(PROMPTS)], SAMPLES)
        ).astype(object),
        "values": column(rng.normal(0, 1, mask.shape)),
        "reward_baselines": torch.from_numpy(rng.uniform(0, 1, rows).astype(np.float32)),
        "old_log_probs": column(np.log(probability)),
        "sum_pi_squared": column(probability**2 + (1 - probability) ** 2 / 3),
        "rollout_is_weights": column(rng.uniform(0.5, 2, mask.shape)),
        "scores_by_reward": {name: column(values) for name, values in scores.items()},
        # verl's GDPO takes the scores of the rows, and puts them on the last token itself.
        "non_tensor_batch": {name: values.sum(1) for name, values in scores.items()},
        "batch": {
            "prompts": torch.zeros(rows, 1),
            "attention_mask": torch.from_numpy(attended).long(),
        },
        "config": CONFIG_OF_VERL,
        "gamma": GAMMA,
        "lam": LAM,
    }


def difference(name: str, columns: dict[str, Any]) -> float:
    ours = run(get_adv_estimator_fn(name), columns | {"options": OPTIONS.get(name)})
    theirs = run(estimator_of_verl(name), columns)
    valid = columns["response_mask"].bool()
    return max(
        float((one - other)[valid].abs().max()) for one, other in zip(ours, theirs, strict=True)
    )


def run(function: Callable[..., Any], columns: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The function's result of those columns that it has parameters for."""
    return function(
        **{
            name: columns[name]
            for name in inspect.signature(function).parameters
            if name in columns
        }
    )


if __name__ == "__main__":
    serve(differences)
