"""PPO's clipped surrogate without some of the tokens that lower the entropy most (Clip-Cov, arXiv
2505.22617).

Before the update, over the N response tokens of the whole batch, with the log-probabilities of the
policy before it:

    cov = (A - mean(A)) (old_log_prob - mean(old_log_prob))

Of the tokens with clip_cov_lb < cov < clip_cov_ub, `max(1, floor(clip_cov_ratio N))` are drawn at
random. With `r = exp(log_prob - old_log_prob)`, the exponent clamped to [-20, 20]:

    L = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
    L = 0                                  on drawn tokens whose loss the clip range did not raise

| metric | meaning |
|---|---|
| `actor/pg_clipfrac` | share of tokens whose loss was set to 0 |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

Keys under `actor_rollout_ref.actor`: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`. verl
computes means, count and draw in each micro-batch from the policy that is trained, so its loss
depends on the size of the micro-batches. This form gives the same loss for every size; until the
first optimizer step both have the same log-probabilities.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import masked_mean, zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss
from verl_like.algorithms.policy_losses.clip_cov_options import ClipCovKeys


class ClipCovOptions(ClipCovKeys):
    """The keys, and the choice of tokens that they describe."""

    def select_tokens(
        self,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns the drawn tokens of a whole batch, (B, R) bool."""
        deviation = advantages - masked_mean(advantages, response_mask)
        log_prob_deviation = old_log_probs - masked_mean(old_log_probs, response_mask)
        covariances = deviation * log_prob_deviation
        is_above = covariances > self.clip_cov_lb
        is_below = covariances < self.clip_cov_ub
        in_band = is_above & is_below & response_mask.bool()
        candidates = in_band.flatten().nonzero().squeeze(-1)
        num_tokens = int(response_mask.sum())
        num_drawn = max(1, int(self.clip_cov_ratio * num_tokens))
        places = torch.randperm(len(candidates), generator=generator)[:num_drawn]
        drawn = candidates[places]
        selected = torch.zeros_like(in_band).flatten()
        selected[drawn] = True
        return selected.view_as(in_band)


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
    selected_tokens: Tensor,
    options: ClipCovOptions,
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
    is_raised = clipped > unclipped
    left_out = selected_tokens & ~is_raised
    losses = torch.maximum(unclipped, clipped) * ~left_out

    metrics = {"actor/pg_clipfrac": left_out, "actor/ppo_kl": -log_ratio.detach()}
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
