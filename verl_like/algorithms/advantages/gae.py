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
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.discounted_sums import gae_in_blocks
from verl_like.algorithms.masked import few_rows, masked_whiten


@register_adv_est("gae", over_batch=True)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns whitened advantages, and returns, (B, R) float each. `gamma` is the discount per
    token, `lam` is lambda."""
    with torch.no_grad():
        valid = response_mask.bool()
        advantages = torch.empty_like(values)
        returns = torch.empty_like(values)
        for rows in few_rows(valid):
            advantages[rows], returns[rows] = gae_in_blocks(
                token_level_rewards[rows], values[rows], valid[rows], gamma, lam
            )
        return masked_whiten(advantages, valid), returns
