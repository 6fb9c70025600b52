"""`rloo` under verl's name for its computation without a loop over the groups; `rloo` has no such
loop here.

verl gives a group of one row its score under one of the two names and 0 under the other; here it is
the score.
"""

import numpy as np
import torch

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.rloo import compute_rloo_outcome_advantage


@register_adv_est("rloo_vectorized")
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_rloo_outcome_advantage` of the same arguments."""
    return compute_rloo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, config
    )
