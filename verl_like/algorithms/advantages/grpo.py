"""Group-relative policy optimization (DeepSeekMath, arXiv 2402.03300). Rows with the same `uid` form a group.

    score_i = sum of the token rewards of row i
    A_i     = (score_i - mean) / (std + 1e-6)  mean and unbiased std over the group; every token of row i gets A_i

`algorithm.norm_adv_by_std_in_grpo=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). Special groups:

| group | advantage |
|---|---|
| a row without response tokens (skipped) | 0; it does not enter the group's mean and std |
| one row by design (`rollout.n=1`) | the score itself (mean 0, std 1), as in verl |
| several rows, one of them scored | 0: the baseline is lost, and a raw score is on another scale than its neighbours |
| all scores equal | exactly 0 (the statistics are computed in float64) |

For the third line the skipped rows have to be in the batch that is passed in.

Keys: `algorithm.norm_adv_by_std_in_grpo`, `actor_rollout_ref.rollout.n`.
"""

from collections.abc import Hashable

import numpy as np
import torch

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.masked import few_rows, zero_masked


@register_adv_est("grpo")
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One advantage for each response, at every one of its tokens: (B, R) float, 0 where the mask is 0.

    Args:
        token_level_rewards: (B, R) float.
        response_mask: (B, R) bool or 0/1.
        index: (B,) hashable objects, equal for the rows of one prompt.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False leaves the division out.
        config: not read.

    Returns:
        The advantages (B, R), 0 where the mask is 0, twice: GRPO has no separate returns.
    """
    with torch.no_grad():
        valid = response_mask.bool()
        # float64: in a group of equal scores the mean is then exact and each advantage exactly 0; in float32 the
        # rounding error of the mean, divided by epsilon, would become a visible advantage.
        scores = token_level_rewards.new_zeros(len(valid), dtype=torch.float64)
        for rows in few_rows(valid):
            scores[rows] = zero_masked(token_level_rewards[rows], valid[rows]).sum(dim=-1)
        scored = valid.any(dim=-1)
        codes: dict[Hashable, int] = {}
        group = torch.tensor(
            [codes.setdefault(key, len(codes)) for key in index], dtype=torch.long, device=scores.device
        )

        def group_sum(row_values: torch.Tensor) -> torch.Tensor:
            """Sum of row_values (B,) over the scored rows of each row's group, (B,)."""
            totals = scores.new_zeros(len(codes)).index_add_(0, group, zero_masked(row_values, scored))
            return totals[group]

        num_scored = group_sum(torch.ones_like(scores))
        num_rows = torch.bincount(group, minlength=len(codes))[group]
        deviation = scores - group_sum(scores) / num_scored.clamp(min=1)
        std = torch.sqrt(group_sum(deviation**2) / (num_scored - 1).clamp(min=1))
        deviation = torch.where(num_rows == 1, scores, deviation)
        std = torch.where(num_rows == 1, 1.0, std)
        row_advantages = deviation / (std + epsilon) if norm_adv_by_std_in_grpo else deviation
        advantages = zero_masked(row_advantages.to(token_level_rewards.dtype).unsqueeze(-1), valid)
    return advantages, advantages
