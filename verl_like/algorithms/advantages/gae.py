"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438); needs a critic.

With the reward r_t and the critic's value V_t of response token t:

    delta_t      = r_t + gamma V_{t+1} - V_t
    A_t          = delta_t + gamma lam A_{t+1}
    returns_t    = A_t + V_t
    advantages_t = (A_t - mean) / sqrt(var + 1e-8)

V and A are 0 after the last response token. Mean and unbiased variance of A run over all response
tokens of the batch. `t + 1` is the next token with mask 1: a hole in the mask, such as a tool's
output, takes no discount, and its rewards and values are not read.

Keys: `algorithm.gamma`, `algorithm.lam`.
"""

import torch

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.discounted_sums import gae_in_blocks
from verl_like.algorithms.masked import few_rows, masked_whiten


@register_adv_est("gae", over_batch=True)
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whitened advantages, and returns, (B, R) float each. `gamma` is the discount per
    token, `lam` is lambda."""
    with torch.no_grad():
        valid = response_mask.bool()
        advantages = torch.empty_like(values)
        returns = torch.empty_like(values)
        for rows in few_rows(valid):
            # These are the numbers of `gae_recurrence`, for long responses many times faster.
            advantages[rows], returns[rows] = gae_in_blocks(
                token_level_rewards[rows], values[rows], valid[rows], gamma, lam
            )
        return masked_whiten(advantages, valid), returns


def gae_recurrence(
    rewards: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes advantages before whitening, and returns, (B, R), as they are defined: token by
    token from the last to the first."""
    num_rows, length = values.shape
    advantages = torch.zeros_like(values)
    returns = torch.zeros_like(values)
    next_advantage = values.new_zeros(num_rows)
    next_value = next_advantage
    for t in reversed(range(length)):
        value = values[:, t]
        is_valid = valid[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(is_valid, advantage, 0.0)
        returns[:, t] = torch.where(is_valid, advantage + value, 0.0)
        next_advantage = torch.where(is_valid, advantage, next_advantage)
        next_value = torch.where(is_valid, value, next_value)
    return advantages, returns
