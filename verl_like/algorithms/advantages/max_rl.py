"""Maximum likelihood RL (arXiv 2602.02710): the score above the group's mean, in units of the mean.

    score_i = sum of the token rewards of row i, at least 0
    A_i     = (score_i - mean) / mean     mean over the group; every token of row i gets A_i

With rewards of 0 and 1 the mean estimates the probability of success p, and the gradient of p
divided by p is that of log p: rarely solved prompts weigh more than in `grpo`. It needs no epsilon:
with scores of at least 0 an advantage lies between -1 and the size of the group - 1. A group
without any success has mean 0 and gives 0. Groups of one and with skipped rows are treated as in
`grpo`. verl has no such estimator.

Keys: `actor_rollout_ref.rollout.n`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups


@register_adv_est("max_rl")
@torch.no_grad()
def compute_max_rl_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns.

    Raises ValueError for a score below 0: a mean below 0 would turn the advantages' signs round.
    """
    groups = PromptGroups.of(token_level_rewards, response_mask, index)
    if (groups.scores < 0).any():
        raise ValueError(
            "the advantage estimator 'max_rl' divides by the mean score of a prompt's responses, "
            f"and the batch has a score of {groups.scores.min():.6g}: give rewards of at least 0, "
            "without a KL penalty in them (algorithm.use_kl_in_reward=False), or choose 'grpo'"
        )
    mean = groups.mean()
    is_undivided = groups.is_single | (mean == 0)
    divisor = mean.masked_fill(is_undivided, 1.0)
    row_advantages = groups.scores_above(mean) / divisor
    advantages = groups.on_tokens(row_advantages, token_level_rewards.dtype)
    return advantages, advantages
