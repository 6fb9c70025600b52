"""Soft adaptive policy optimization: a smooth gate in place of the clip (SAPO, arXiv 2511.20347).

With `r = exp(log_prob - old_log_prob)`, the exponent clamped to [-20, 20], and tau = tau_pos where
A > 0, else tau_neg:

    L = -A (4 / tau) sigmoid(tau (r - 1))

The gate's slope is 1 at r = 1 and goes to 0 on both sides.

| metric | meaning |
|---|---|
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

The loss is defined as the mean over responses of the mean over tokens: `actor.loss_agg_mode` is
seq-mean-token-mean with it, and another mode is refused; verl uses that mode whatever the key says.
verl also reports `actor/pg_clipfrac` and `actor/pg_clipfrac_lower`, which are always 0.
"""

from typing import Literal

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss
from verl_like.algorithms.policy_losses.sapo_options import SapoOptions


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: Literal["seq-mean-token-mean"] = "seq-mean-token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
    options: SapoOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""
    log_prob = zero_masked(log_prob, response_mask)
    log_ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0)
    ratio = torch.exp(log_ratio)
    tau = torch.full_like(advantages, options.tau_neg)
    tau = tau.masked_fill(advantages > 0, options.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    losses = -advantages * gate * (4 / tau)

    metrics = {"actor/ppo_kl": -log_ratio.detach()}
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
