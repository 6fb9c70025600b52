"""`grpo` under verl's name for its computation without a loop over the groups; `grpo` has no such
loop here.

In verl the two differ in the last digits; here they are the same function.
"""

import numpy as np
import torch

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.grpo import compute_grpo_outcome_advantage


@register_adv_est("grpo_vectorized")
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_grpo_outcome_advantage` of the same arguments."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )
