"""GDPO (arXiv 2601.05242): several rewards, each normalised in its group before they are added up.

    A_ik = (r_ik - mean_k) / (std_k + 1e-6)     reward k of row i; mean and unbiased std of group
    S_i  = sum_k w_k A_ik                       at every token of row i
    A_i  = (S_i - mean) / sqrt(var + 1e-8)      mean, unbiased variance over all response tokens

`grpo` normalises the sum of the rewards, in which one with a large spread outweighs the others.
Here each counts by its weight w_k. `algorithm.norm_adv_by_std_in_grpo=False` leaves the first
division out. Groups of one, of equal scores and with skipped rows are treated as in `grpo` before
the last step; a row that lost its baseline is left out of it and gets 0. Where a row lacks reward
k, a number that the reward function did not return for it, the row is as if it were skipped for
that reward alone: A_ik is 0, and mean_k and std_k are those of the other rows.
`algorithm.use_kl_in_reward` and `reward.overlong_buffer` change the sum of the rewards, which is
not read: they are refused. verl ignores the KL penalty, and falls back to the sum of the rewards
where the keys are not given.

Keys: `algorithm.gdpo_reward_keys`, `algorithm.gdpo_reward_weights`,
`algorithm.norm_adv_by_std_in_grpo`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.gdpo_options import GDPOOptions
from verl_like.algorithms.groups import PromptGroups
from verl_like.algorithms.masked import masked_whiten, zero_masked


@register_adv_est("gdpo", over_batch=True)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    scores_by_reward: dict[str, Tensor],
    response_mask: Tensor,
    index: np.ndarray,
    options: GDPOOptions,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns.

    `epsilon` is added to each standard deviation. A score is NaN where a row lacks the reward.
    Raises ValueError for a reward that the run does not have.
    """
    keys = options.gdpo_reward_keys
    options.require_rewards(scores_by_reward)
    valid = response_mask.bool()
    summed = valid.new_zeros(len(valid), dtype=torch.float64)
    is_compared = valid.new_zeros(len(valid))
    weights = options.gdpo_reward_weights or [1.0] * len(keys)
    for key, weight in zip(keys, weights, strict=True):
        scores = scores_by_reward[key]
        is_missing = zero_masked(scores, valid).isnan()
        has_score = ~is_missing.any(dim=-1, keepdim=True)
        groups = PromptGroups.of(scores, valid & has_score, index)
        row_advantages = groups.scores_above(groups.mean())
        if norm_adv_by_std_in_grpo:
            row_advantages = row_advantages / (groups.std() + epsilon)
        summed += weight * row_advantages
        is_compared |= groups.has_baseline
    compared = valid & is_compared.unsqueeze(-1)
    dtype = scores_by_reward[keys[0]].dtype
    row_sums = summed.to(dtype).unsqueeze(-1)
    on_tokens = zero_masked(row_sums, compared)
    advantages = masked_whiten(on_tokens, compared)
    return advantages, advantages
