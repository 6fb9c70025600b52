"""A plugin that records what an advantage estimator is given: tokens, log-probabilities and rewards
of every step.

`recorded_gae` and `recorded_grpo` are the library's estimators, which a version of the project
computes as it does. SAME_NUMBERS_OUT is the folder that gets a file a step. This file runs with two
versions of the project, so it uses only what both offer to plugins.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.algorithms.advantages import get_adv_estimator_fn, register_adv_est

gae = get_adv_estimator_fn("gae")
grpo = get_adv_estimator_fn("grpo")
recorded_steps = 0


def record(mask_BR: Any, **columns: Any) -> None:
    """Writes the columns of the step to a file, with 0 where there is no response token."""
    global recorded_steps
    recorded_steps += 1
    valid = np.asarray(mask_BR, dtype=bool)
    arrays = {
        name: np.where(valid, column, 0) for name, column in columns.items() if column is not None
    }
    folder = Path(os.environ["SAME_NUMBERS_OUT"])
    np.savez(folder / f"step_{recorded_steps:03}.npz", response_mask=valid, **arrays)


@register_adv_est("recorded_gae", over_batch=True)
def recorded_gae(
    token_level_rewards,
    values,
    response_mask,
    gamma,
    lam,
    responses=None,
    rollout_log_probs=None,
    old_log_probs=None,
    ref_log_prob=None,
):
    record(
        response_mask,
        tokens=responses,
        rewards=token_level_rewards,
        values=values,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=old_log_probs,
        ref_log_prob=ref_log_prob,
    )
    return gae(token_level_rewards, values, response_mask, gamma, lam)


@register_adv_est("recorded_grpo")
def recorded_grpo(
    token_level_rewards,
    response_mask,
    index,
    responses=None,
    rollout_log_probs=None,
    old_log_probs=None,
    ref_log_prob=None,
):
    record(
        response_mask,
        tokens=responses,
        rewards=token_level_rewards,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=old_log_probs,
        ref_log_prob=ref_log_prob,
    )
    return grpo(token_level_rewards, response_mask, index)
