"""REINFORCE++ (arXiv 2501.03262): the discounted sum of the rewards from a token on, whitened over
the whole batch.

With the reward r_t of response token t:

    returns_t = r_t + gamma returns_{t+1}              0 after the last response token
    A_t       = (returns_t - mean) / sqrt(var + 1e-8)

Mean and unbiased variance run over all response tokens of the batch. `t + 1` is the next token with
mask 1, as in `gae`. The paper subtracts a KL penalty from every token's reward:
`algorithm.use_kl_in_reward=True` with `algorithm.kl_penalty=k1`. A single token has no spread and
gives 0, which verl refuses.

Keys: `algorithm.gamma`.
"""

from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.gae import compute_gae_advantage_return


@register_adv_est("reinforce_plus_plus", over_batch=True)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, (B, R) float each. Of `config`, the block `algorithm`, it
    reads `gamma`."""
    # This is GAE with V = 0 and lam = 1.
    no_values = torch.zeros_like(token_level_rewards)
    return compute_gae_advantage_return(
        token_level_rewards, no_values, response_mask, config.gamma, lam=1.0
    )
