"""Dr. GRPO (arXiv 2503.20783): the score above the group's mean. Rows with the same `uid` form a
group.

    score_i = sum of the token rewards of row i
    A_i     = score_i - mean of the group      every token of row i gets A_i

The paper does not divide by the standard deviation, which favours prompts that are nearly always or
nearly never solved, and not by the length of the response: set `actor.loss_agg_mode` to
`seq-mean-token-sum-norm` with it. The numbers are those of `grpo` with
`algorithm.norm_adv_by_std_in_grpo=False`. Groups of one, of equal scores and with skipped rows are
treated as there.

Keys: `actor_rollout_ref.rollout.n`.
"""

import numpy as np
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.grpo import compute_grpo_outcome_advantage


@register_adv_est("dr_grpo")
def compute_dr_grpo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=False
    )
