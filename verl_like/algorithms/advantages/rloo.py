"""REINFORCE leave-one-out (arXiv 2402.14740): the score above the mean of the other responses to
the same prompt.

    score_i = sum of the token rewards of row i
    A_i     = score_i - mean of the scores of the group's other rows

Every token of row i gets A_i.

The baseline does not contain the row itself, so the gradient is unbiased. Groups of one, of equal
scores and with skipped rows are treated as in `grpo`.

`rloo_vectorized` is another name of this estimator, and
`compute_rloo_vectorized_outcome_advantage` of its function. In verl it is the computation without a
loop over the groups, and a group of one row gets its score under one of the two names and 0 under
the other; here it is the score.

Keys: `actor_rollout_ref.rollout.n`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups


@register_adv_est("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: object = None,
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns.

    `epsilon` and `config` are parameters in verl and not read.
    """
    groups = PromptGroups.of(token_level_rewards, response_mask, index)
    sum_of_others = groups.sum(groups.scores) - groups.scores
    num_others = (groups.num_scored - 1).clamp(min=1)
    row_advantages = groups.scores_above(sum_of_others / num_others)
    advantages = groups.on_tokens(row_advantages, token_level_rewards.dtype)
    return advantages, advantages


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
