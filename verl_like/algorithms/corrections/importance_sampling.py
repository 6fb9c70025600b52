"""Importance weights of tokens or responses, truncated above (TIS) or set to 0 outside a band
(IcePop).

With `d = old_log_probs - rollout_log_probs` of a token, and each exponent clamped to [-20, 20]:

    w = exp(d)                             rollout_is=token: biased, low variance
    w = exp(sum of d over the response)    rollout_is=sequence: unbiased until truncated
    w = min(w, C)                          rollout_is_threshold=C
    w = w where a <= w <= b, else 0        rollout_is_threshold=a_b
    w = w / mean(w)                        rollout_is_batch_normalize=True: over the batch

The loss of each token is multiplied by w, which has no gradient.

| metric | meaning |
|---|---|
| `rollout_corr/rollout_is_mean`, `_std` | of the applied weights over tokens, not normalized |
| `rollout_corr/rollout_is_max`, `_min` | of the weights before they are truncated |
| `rollout_corr/rollout_is_eff_sample_size` | effective samples / tokens: mean(w)^2 / mean(w^2) |
| `rollout_corr/rollout_is_ratio_fraction_high` | share of weights that were above C or b |
| `rollout_corr/rollout_is_ratio_fraction_low` | share of weights that were below 1 / C or a |
| `rollout_corr/rollout_is_oob_ratio` | share of tokens outside the band, whose weight is 0 |
| `rollout_corr/rollout_is_batch_norm_factor` | the mean by which the weights were divided |

The effective sample size falls before a run collapses (arXiv 2602.17616). Truncation: Yao et al.
2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Band: IcePop, arXiv
2510.18855. verl's max and min of token weights are those after the truncation.
"""

import torch
from torch import Tensor

from verl_like.algorithms.corrections import read_band
from verl_like.algorithms.masked import masked_mean, zero_masked


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Returns the weights (B, R), 0 where the mask is 0 and without a gradient, and their metrics
    without the prefix.

    Args:
        log_ratio: (B, R) float, log-probabilities of the trainer minus those of the rollout.
        response_mask: (B, R) bool or 0/1.
        rollout_is: "token" or "sequence".
        rollout_is_threshold: the largest weight, or a band "lower_upper".
        rollout_is_batch_normalize: True divides the weights by their mean over tokens or
            responses.
    """
    assert rollout_is in ("token", "sequence"), rollout_is
    lower, upper = read_band(rollout_is_threshold, "rollout_is_threshold")
    with torch.no_grad():
        mask = response_mask.bool()
        log_weights = zero_masked(log_ratio, mask)
        if rollout_is == "sequence":
            log_weights = log_weights.sum(-1, keepdim=True).expand_as(log_ratio)
        raw = log_weights.clamp(-20.0, 20.0).exp()
        raw = zero_masked(raw, mask)
        if lower is None:
            weights = raw.clamp(max=upper)
        else:
            outside = (raw < lower) | (raw > upper)
            weights = raw.masked_fill(outside, 0.0)
        if not mask.any():
            return weights, {}

        def units(values: Tensor) -> Tensor:
            """Returns the values of what has a weight of its own: tokens, or one number a
            response."""
            if rollout_is == "token":
                return values[mask]
            has_tokens = mask.any(-1)
            return masked_mean(values, mask, axis=-1)[has_tokens]

        of_tokens = weights[mask]
        raw_of_tokens = raw[mask]
        mean = of_tokens.mean()
        mean_square = of_tokens.square().mean()
        variance = mean_square - mean.square()
        tiny = torch.finfo(mean.dtype).tiny
        is_high = units(raw) > upper
        is_low = units(raw) < (lower or 1 / upper)
        metrics = {
            "rollout_is_mean": mean,
            "rollout_is_std": variance.clamp(min=0.0).sqrt(),
            "rollout_is_max": raw_of_tokens.max(),
            "rollout_is_min": raw_of_tokens.min(),
            "rollout_is_eff_sample_size": mean.square() / mean_square.clamp(min=tiny),
            "rollout_is_ratio_fraction_high": is_high.float().mean(),
            "rollout_is_ratio_fraction_low": is_low.float().mean(),
        }
        if lower is not None:
            metrics["rollout_is_oob_ratio"] = outside[mask].float().mean()
        if rollout_is_batch_normalize:
            factor = units(weights).mean()
            metrics["rollout_is_batch_norm_factor"] = factor
            if factor > 0:
                weights = weights / factor
    numbers = {name: float(value) for name, value in metrics.items()}
    return weights, numbers
