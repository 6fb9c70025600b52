"""Clipped surrogate of PPO (Schulman et al., arXiv 1707.06347) with dual clip (Ye et al., arXiv
1912.09729).

With `r = exp(log_prob - old_log_prob)`, the exponent clamped to [-20, 20]:

    L = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
    L = min(L, -A clip_ratio_c)                where A < 0

| metric | meaning |
|---|---|
| `actor/pg_clipfrac` | share of tokens whose loss the clip range raised |
| `actor/pg_clipfrac_lower` | share of tokens whose loss the dual clip bounded |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

Keys under `actor_rollout_ref.actor`: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`,
`clip_ratio_c`.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""
    assert config is not None
    log_prob = zero_masked(log_prob, response_mask)
    log_ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0)
    ratio = torch.exp(log_ratio)

    lowest = 1 - config.clip_ratio_low
    highest = 1 + config.clip_ratio_high
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    surrogate = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    bounded = torch.minimum(surrogate, bound)
    losses = torch.where(advantages < 0, bounded, surrogate)

    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": clipped > unclipped,
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac_lower": (surrogate > bound) & (advantages < 0),
        }
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
