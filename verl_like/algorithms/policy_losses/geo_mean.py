"""Geometric-mean policy optimization: a response's ratio is the geometric mean of its tokens'
(GMPO, arXiv 2507.20673).

With `d = log_prob - old_log_prob`, clamped to [-20, 20], and `d_clip = clip(d, -clip_ratio_low,
clip_ratio_high)`:

    m = min(d, d_clip) where A > 0,  max(d, d_clip) where A < 0,  0 where A = 0
    L = -mean(A) exp(mean(m))            means over the tokens of the row, which all have this loss

| metric | meaning |
|---|---|
| `actor/pg_clipfrac` | share of tokens out of the range whose advantage is positive |
| `actor/pg_clipfrac_lower` | share of tokens out of the range whose advantage is negative |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

Keys under `actor_rollout_ref.actor`: `clip_ratio`, `clip_ratio_low` and `clip_ratio_high` bound the
logarithm of the ratio; the paper takes 0.4. The loss is one number per response:
`actor.loss_agg_mode` is seq-mean-token-mean with it, and another mode is refused; verl takes the
mean over the responses of a micro-batch, skipped ones included, whatever the key says, and does not
clamp d. The paper has one advantage per response; of advantages that differ by token, as with
`gae`, the mean is taken, as in verl. A response's weight is the geometric mean of
`rollout_is_weights`, each plus 1e-10, so that one token of weight 0 does not remove the response.
Tokens that a tool wrote or a correction removed enter none of the means.
"""

from typing import Literal

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import masked_mean, zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: Literal["seq-mean-token-mean"] = "seq-mean-token-mean",
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
    in_range = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    sign = advantages.sign()
    limited = sign * torch.minimum(sign * log_ratio, sign * in_range)
    advantages_B = masked_mean(advantages, response_mask, axis=-1)
    ratios_B = masked_mean(limited, response_mask, axis=-1).exp()
    losses_B = -advantages_B * ratios_B
    if rollout_is_weights is not None:
        log_weights = (rollout_is_weights + 1e-10).log()
        weights_B = masked_mean(log_weights, response_mask, axis=-1).exp()
        losses_B = losses_B * weights_B
    losses = losses_B.unsqueeze(-1).expand_as(log_ratio)

    with torch.no_grad():
        clipped = log_ratio != in_range
        metrics = {
            "actor/pg_clipfrac": clipped & (advantages > 0),
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac_lower": clipped & (advantages < 0),
        }
    loss = agg_loss(losses, response_mask, loss_agg_mode, **counts.arguments)
    return loss, metrics
