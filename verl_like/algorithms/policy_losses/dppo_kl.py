"""Divergence PPO: a token leaves the loss where the policy moved too far in KL (DPPO-Binary-KL,
arXiv 2602.04879).

With `p = exp(log_prob)`, `p_old = exp(old_log_prob)`, `r = exp(log_prob - old_log_prob)`, the
exponent clamped to [-20, 20], and sg, which stops the gradient:

    L = -sg[min(r, clip_ratio_c)] A log_prob
    L = 0              where A > 0, p > p_old and KL > clip_ratio_high, or
                       A < 0, p < p_old and KL > clip_ratio_low
    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

KL is that of the old policy to the new one for two events: this token, or any other.

| metric | meaning |
|---|---|
| `actor/pg_clipfrac` | share of tokens that the mask left out |
| `actor/pg_clipfrac_lower` | share of tokens in the loss whose ratio was truncated |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

Keys under `actor_rollout_ref.actor`: `clip_ratio`, `clip_ratio_low` and `clip_ratio_high` are the
thresholds, in nats. `clip_ratio_c` bounds the ratio; the paper takes 20 (section 5.4), the key's
default is 3: set it. 1e-8 is added to `1 - p` and `1 - p_old`. A token whose advantage is 0 counts
in the metrics as if it were negative; its loss is 0.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
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
    prob = log_prob.detach().exp()
    old_prob = old_log_prob.exp()
    kl_of_token = old_prob * (old_log_prob - log_prob.detach())
    ratio_of_others = (1 - old_prob + 1e-8) / (1 - prob + 1e-8)
    kl_of_others = (1 - old_prob) * torch.log(ratio_of_others)
    binary_kl = kl_of_token + kl_of_others
    may_rise = (binary_kl <= config.clip_ratio_high) | (prob <= old_prob)
    may_fall = (binary_kl <= config.clip_ratio_low) | (prob >= old_prob)
    is_valid = torch.where(advantages > 0, may_rise, may_fall)
    truncated = ratio.clamp(max=config.clip_ratio_c)
    losses = -truncated * advantages * log_prob * is_valid

    metrics = {
        "actor/pg_clipfrac": ~is_valid,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": is_valid & (ratio > config.clip_ratio_c),
    }
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
