"""Pass@k (arXiv 2503.19595): only the best response of a group is rewarded, for what it adds to the
group's best.

    score_i = sum of the token rewards of row i
    A_i     = (largest score - second largest score) / (std + 1e-6)    for the best row
    A_i     = 0                                                        for the others

Every token of row i gets A_i.

`algorithm.norm_adv_by_std_in_grpo=False` leaves out the division by the group's unbiased standard
deviation. Where two rows share the largest score, no row adds anything: all are 0. Groups of one
and groups with skipped rows are treated as in `grpo`; verl refuses a group of one, and reads the
key from `config` whatever the argument says.

Keys: `algorithm.norm_adv_by_std_in_grpo`, `actor_rollout_ref.rollout.n`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups
from verl_like.algorithms.masked import zero_masked


@register_adv_est("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
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
    best = groups.largest(groups.scores, groups.scored)
    is_best = groups.scored & (groups.scores == best)
    num_best = groups.sum(is_best.double())
    second_best = groups.largest(groups.scores, groups.scored & ~is_best)
    margin = groups.scores_above(second_best)
    row_advantages = zero_masked(margin, is_best & (num_best == 1))
    if norm_adv_by_std_in_grpo:
        row_advantages = row_advantages / (groups.std() + epsilon)
    advantages = groups.on_tokens(row_advantages, token_level_rewards.dtype)
    return advantages, advantages
