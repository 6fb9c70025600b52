"""Rejection: tokens, or whole responses, that drifted too far leave `response_mask`.

With `d = old_log_probs - rollout_log_probs`, clamped to [-20, 20], a statistic has a level and a divergence:

| ending | of a token | kept where |
|---|---|---|
| `k1` | -d | lower <= exp(statistic) <= upper, ratios of the rollout's probability to the trainer's |
| `k2` | d^2 / 2 | statistic <= upper |
| `k3` | exp(d) - d - 1 | statistic <= upper |

| beginning | what is compared, and leaves |
|---|---|
| `token_` | each token; `token_k1` is the double-sided mask of tokens (IcePop) |
| `seq_sum_` | the sum over the response; with k1 its whole ratio |
| `seq_mean_` | the mean over the response; with k1 the geometric mean of its ratios |
| `seq_max_` | the largest token of the response |

Of several statistics, each must keep the token. The loss's denominators count what is kept. Advantages are computed
before, so that a response's reward still counts in its group.

| metric | meaning |
|---|---|
| `rollout_corr/rollout_rs_<statistic>_mean`, `_max`, `_min` | of the statistic, k1 as -d |
| `rollout_corr/rollout_rs_<statistic>_masked_fraction` | share of tokens that it removes |
| `rollout_corr/rollout_rs_<statistic>_seq_masked_fraction` | share of responses that it removes tokens of |
| `rollout_corr/rollout_rs_masked_fraction`, `_seq_masked_fraction` | the same of all statistics together |

"When Speed Kills Stability" (Liu et al. 2025) has the reasons for responses, arXiv 2510.18855 those for tokens.
"""

import math

import torch

from verl_like.algorithms.corrections import rejection_bounds
from verl_like.algorithms.masked import masked_mean, masked_sum, zero_masked


def compute_rollout_rejection_mask(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """response_mask (B, R) without what is rejected, in its dtype, and metrics without the prefix.

    Args:
        log_ratio: (B, R) float, log-probabilities of the trainer minus those of the rollout.
        response_mask: (B, R) bool or 0/1.
        rollout_rs: statistics, separated by commas.
        rollout_rs_threshold: one bound, or one for each statistic.

    Raises:
        ValueError: an unknown statistic, or bounds that do not fit it.
    """
    bounds = rejection_bounds(rollout_rs, rollout_rs_threshold)
    mask = response_mask.bool()
    kept = mask.clone()
    metrics: dict[str, float] = {}

    def shares_removed(kept: torch.Tensor, prefix: str) -> dict[str, float]:
        removed = {"masked": (~kept)[mask], "seq_masked": (mask & ~kept).any(-1)[mask.any(-1)]}
        return {f"{prefix}_{what}_fraction": float(each.float().mean()) for what, each in removed.items()}

    with torch.no_grad():
        d = zero_masked(log_ratio, mask).clamp(-20.0, 20.0)
        divergences = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}
        if not mask.any():
            return response_mask, {}
        for name, (lower, upper) in bounds.items():
            level, _, ending = name.rpartition("_")
            values = divergences[ending]
            if level == "seq_sum":
                values = masked_sum(values, mask, axis=-1).unsqueeze(-1).expand_as(d)
            elif level == "seq_mean":
                values = masked_mean(values, mask, axis=-1).unsqueeze(-1).expand_as(d)
            elif level == "seq_max":
                values = values.amax(-1, keepdim=True).expand_as(d)  # k2 and k3 are 0 where the mask is, and never less
            if lower is None:
                keeps = values <= upper
            else:
                keeps = (values >= math.log(lower)) & (values <= math.log(upper))
            kept &= keeps
            prefix, counted = f"rollout_rs_{name}", values[mask]
            metrics |= {f"{prefix}_mean": float(counted.mean()), f"{prefix}_max": float(counted.max())}
            metrics |= {f"{prefix}_min": float(counted.min()), **shares_removed(keeps, prefix)}
    return kept.to(response_mask.dtype), metrics | shares_removed(kept, "rollout_rs")
