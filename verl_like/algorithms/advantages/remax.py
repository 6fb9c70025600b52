"""ReMax (arXiv 2310.10505): the sum of the rewards from a token on, minus that of a greedy response
to the prompt.

With the reward r_t of response token t:

    returns_t = r_t + r_{t+1} + ...          over the row's response tokens
    A_t       = returns_t - total reward of the greedy response

A hole in the mask, such as a tool's output, is left out. Returns are 0 where the mask is 0; verl's
are not in holes.

Keys: none. Each step also generates one greedy response to every prompt.
"""

import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.discounted_sums import sums_from_here
from verl_like.algorithms.masked import zero_masked


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: object = None,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, (B, R) float each. `config` is a parameter in verl and not
    read.

    Where the greedy response was skipped, the baseline is NaN: the row's advantages are 0.
    """
    valid = response_mask.bool()
    rewards = zero_masked(token_level_rewards, valid)
    sums = sums_from_here(rewards.double()).to(rewards.dtype)
    returns = zero_masked(sums, valid)
    baselines = reward_baselines.unsqueeze(-1)
    has_baseline = valid & ~baselines.isnan()
    advantages = zero_masked(returns - baselines, has_baseline)
    return advantages, returns
