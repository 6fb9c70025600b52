"""Group sequence policy optimization: the ratio and its clip are those of the whole response (GSPO,
arXiv 2507.18071).

With sg, which stops the gradient:

    s   = exp(mean over the row's tokens of (log_prob - old_log_prob)), at most e^10
    s_t = sg[s] exp(log_prob - sg[log_prob])
    L   = max(-A s_t, -A clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

| metric | meaning |
|---|---|
| `actor/pg_clipfrac` | share of tokens whose loss the clip range raised |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob` |

s_t has the value of s and the gradient of token t alone (GSPO-token, section 4.3).

Keys under `actor_rollout_ref.actor`: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`. The ratio
of a whole response moves far less than a token's: the paper takes 3e-4 and 4e-4. The paper's loss
is the mean over responses of the mean over tokens, which is what `loss_agg_mode` is with this loss
where it is not set: seq-mean-token-mean. Another mode that is set is computed, with a warning when
the run starts. In verl the key is token-mean also for this loss, unless it is set; early versions
took the paper's mean whatever it said. Tokens that a tool wrote or a correction removed enter
neither the ratio nor the length. verl also reports `actor/pg_clipfrac_lower`, always 0.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import masked_mean, zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""
    assert config is not None
    log_prob = zero_masked(log_prob, response_mask)
    log_ratio = log_prob - old_log_prob
    log_sequence_ratio_B = masked_mean(log_ratio.detach(), response_mask, axis=-1)
    # The first two cancel but for the gradient.
    log_token_ratio = log_prob - log_prob.detach() + log_sequence_ratio_B.unsqueeze(-1)
    ratio = torch.exp(log_token_ratio.clamp(max=10.0))

    lowest = 1 - config.clip_ratio_low
    highest = 1 + config.clip_ratio_high
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    losses = torch.maximum(unclipped, clipped)

    metrics = {"actor/pg_clipfrac": clipped > unclipped, "actor/ppo_kl": -log_ratio.detach()}
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
