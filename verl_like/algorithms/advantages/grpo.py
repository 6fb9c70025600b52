"""Group-relative policy optimization (DeepSeekMath, arXiv 2402.03300). Rows with the same `uid`
form a group.

    score_i = sum of the token rewards of row i
    A_i     = (score_i - mean) / (std + 1e-6)     mean and unbiased std over the group

Every token of row i gets A_i. `algorithm.norm_adv_by_std_in_grpo=False` leaves the division out
(Dr. GRPO, arXiv 2503.20783). Special groups:

| group | advantage |
|---|---|
| a row without response tokens (skipped) | 0; it does not enter the group's mean and std |
| one row by design (`rollout.n=1`) | the score itself (mean 0, std 1), as in verl |
| several rows, one of them scored | 0: the baseline is lost, and a raw score has another scale |
| all scores equal | exactly 0 (the statistics are computed in float64) |

For the third line the skipped rows have to be in the batch that is passed in.

`grpo_vectorized` is another name of this estimator, and
`compute_grpo_vectorized_outcome_advantage` of its function. In verl it is the computation without a
loop over the groups, whose results differ in the last digits; here there is no such loop.

Keys: `algorithm.norm_adv_by_std_in_grpo`, `actor_rollout_ref.rollout.n`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups


@register_adv_est("grpo")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: object = None,
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns.

    `epsilon` is added to the standard deviation. `config` is a parameter in verl and not read.
    """
    groups = PromptGroups.of(token_level_rewards, response_mask, index)
    row_advantages = groups.scores_above(groups.mean())
    if norm_adv_by_std_in_grpo:
        row_advantages = row_advantages / (groups.std() + epsilon)
    advantages = groups.on_tokens(row_advantages, token_level_rewards.dtype)
    return advantages, advantages


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
