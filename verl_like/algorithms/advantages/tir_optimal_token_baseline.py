"""`optimal_token_baseline` (arXiv 2602.07078) for responses with tool outputs: positions count
response tokens alone.

The n-th response token of a row is compared with the n-th response tokens of its group's other
rows, wherever tool outputs stand between them; `optimal_token_baseline` compares equal positions of
the padded response. Formula, special cases and differences from verl are the same.

Keys: none.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.optimal_token_baseline import (
    compute_optimal_token_baseline_advantage,
)


@register_adv_est("tir_optimal_token_baseline")
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Returns what `compute_optimal_token_baseline_advantage` returns when the response tokens of
    each row are moved to the left."""
    is_other = ~response_mask.bool()
    tokens_first = is_other.byte().argsort(dim=-1, stable=True)

    def aligned(column: Tensor) -> Tensor:
        """Moves the response tokens of each row to the left."""
        return column.gather(1, tokens_first)

    advantages, returns = compute_optimal_token_baseline_advantage(
        aligned(token_level_rewards),
        aligned(response_mask),
        index,
        aligned(old_log_probs),
        aligned(sum_pi_squared),
        None if rollout_is_weights is None else aligned(rollout_is_weights),
        handle_zero_tail,
        epsilon,
    )

    def moved_back(column: Tensor) -> Tensor:
        """Moves what was aligned to where it was."""
        return torch.empty_like(column).scatter_(1, tokens_first, column)

    return moved_back(advantages), moved_back(returns)
