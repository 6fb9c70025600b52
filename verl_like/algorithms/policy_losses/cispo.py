"""Clipped importance weights under which every token keeps its gradient (CISPO, MiniMax-M1, arXiv
2506.13585).

With `r = exp(log_prob - old_log_prob)`, the exponent clamped to [-20, 20], and sg, which stops the
gradient:

    L = -sg[clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)] A log_prob

| metric | meaning |
|---|---|
| `actor/pg_clipfrac` | share of tokens whose weight was clipped |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

Keys under `actor_rollout_ref.actor`: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`. The paper
sets no lower bound: `clip_ratio_low=1`. verl also reports `actor/pg_clipfrac_lower`, which is
always 0.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
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
    log_ratio = (log_prob - old_log_prob).detach().clamp(-20.0, 20.0)
    ratio = torch.exp(log_ratio)
    lowest = 1 - config.clip_ratio_low
    highest = 1 + config.clip_ratio_high
    clipped = ratio.clamp(lowest, highest)
    losses = -clipped * advantages * log_prob

    metrics = {"actor/pg_clipfrac": ratio != clipped, "actor/ppo_kl": -log_ratio}
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
