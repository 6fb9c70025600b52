"""Optimal token baseline (arXiv 2602.07078): a baseline of least variance for each position of the
response.

With the reward r_t of token t, its probability pi_t under `old_log_probs`, the sum q_t of the
squared probabilities of the vocabulary there, and its importance weight rho_t (1 without
`algorithm.rollout_correction.rollout_is`):

    G_t = r_t + r_{t+1} + ...                        over the row's response tokens
    w_t = (1 - 2 pi_t + q_t) rho_t^2
    W_t = w_1 + ... + w_t + 1e-8                     over the row's response tokens
    B_t = sum_i W_it G_it / sum_i W_it               over the group's rows i with a token at t
    A_t = G_t - B_t

1 - 2 pi_t + q_t is the squared norm of the gradient of log pi_t by the logits. The returns are G.
Special cases:

| position | advantage |
|---|---|
| no other row of the group has a token here | G_t (no baseline); with `handle_zero_tail=False` 0 |
| a group of one row by design | G_t |
| the only scored row of a larger group, see `grpo` | 0 |
| equal scores, each on the last token | exactly 0 |

Differences from verl: it adds 1e-8 to the sum of the weights, so its baseline is 0 where the policy
was certain of every token up to t; here the weights are equal then. It finds the tail of the
longest row by the number of tokens, which is wrong in masks with holes, and its returns are not 0
in holes.

The actor computes `sum_pi_squared` with `old_log_probs` before the update, so `bypass_mode` of the
old log-probabilities is refused.

Keys: none.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.discounted_sums import sums_from_here
from verl_like.algorithms.groups import PromptGroups
from verl_like.algorithms.masked import zero_masked


@register_adv_est("optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, (B, R) float each; `epsilon` is added to each weight W.

    With `handle_zero_tail` there is no baseline at a position where no other row of the group has a
    token.
    """
    groups = PromptGroups.of(token_level_rewards, response_mask, index)
    valid = groups.valid
    squared_norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    # Of probabilities it is at least 0, but the inputs are rounded.
    squared_norms = squared_norms.clamp(min=0)
    if rollout_is_weights is not None:
        squared_norms = squared_norms * rollout_is_weights**2
    norms_so_far = zero_masked(squared_norms, valid).double().cumsum(-1)
    weights = zero_masked(norms_so_far + epsilon, valid)

    def group_sum(columns: Tensor) -> Tensor:
        """Returns the sum of `columns` (B, R) over the rows of the group, (B, R)."""
        totals = columns.new_zeros(groups.num_groups, columns.size(1))
        totals.index_add_(0, groups.group, columns)
        return totals[groups.group]

    rewards = zero_masked(token_level_rewards, valid).double()
    returns = sums_from_here(rewards)
    # Equal returns less the mean score are exactly 0, and so is their weighted mean.
    mean_score = groups.mean().unsqueeze(-1)
    centred = zero_masked(returns - mean_score, valid)
    baselines = group_sum(weights * centred) / group_sum(weights)
    is_alone = group_sum(valid.double()) == 1
    has_no_baseline = groups.is_single | ((groups.num_scored > 1) & handle_zero_tail)
    alone_returns = zero_masked(returns, has_no_baseline.unsqueeze(-1))
    advantages = torch.where(is_alone, alone_returns, centred - baselines)
    advantages = zero_masked(advantages, valid)
    returns = zero_masked(returns, valid)
    dtype = token_level_rewards.dtype
    return advantages.to(dtype), returns.to(dtype)
