"""Rejection: tokens or whole responses leave the loss where rollout and trainer differ too much.

With `d = old_log_probs - rollout_log_probs` of a token, clamped to [-20, 20], the ending of a
statistic's name says what is computed for each token, and how it is compared with
`rollout_rs_threshold`:

    k1 = -d                    kept where a <= exp(statistic) <= b    rollout_rs_threshold=a_b or b
    k2 = d^2 / 2               kept where statistic <= b              rollout_rs_threshold=b
    k3 = exp(d) - d - 1        kept where statistic <= b              rollout_rs_threshold=b

exp(k1) is the ratio of the rollout's probability to the trainer's. The beginning of the name says
over which tokens:

| beginning | statistic | what leaves |
|---|---|---|
| `token_` | of the token | the token |
| `seq_sum_` | sum over the response; exp(`seq_sum_k1`) is its probability ratio | the response |
| `seq_mean_` | mean over the response; exp(`seq_mean_k1`) is a geometric mean | the response |
| `seq_max_` | the largest of the response; not with k1 | the response |

A token is kept where every statistic of `rollout_rs` keeps it. `response_mask` becomes 0 elsewhere,
and the denominators of the loss count what is kept. Advantages are computed before, so that a
rejected response still counts in its group.

| metric | meaning |
|---|---|
| `rollout_corr/rollout_rs_<statistic>_mean`, `_max`, `_min` | of the statistic over tokens |
| `rollout_corr/rollout_rs_<statistic>_masked_fraction` | share of tokens that it removes |
| `rollout_corr/rollout_rs_<statistic>_seq_masked_fraction` | share of responses that lose tokens |
| `rollout_corr/rollout_rs_masked_fraction`, `_seq_masked_fraction` | the same of all together |

Tokens: IcePop (arXiv 2510.18855), whose weights are those of importance_sampling.py. Responses: Liu
et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
Mismatch".
"""

import math

import torch
from torch import Tensor

from verl_like.algorithms.corrections import rejection_bounds
from verl_like.algorithms.masked import masked_mean, masked_sum, zero_masked


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Returns response_mask (B, R) without what is rejected, in its dtype, and metrics without the
    prefix.

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

    def add_shares(kept: Tensor, prefix: str) -> None:
        """Adds the metrics of the shares of tokens, and of responses, that lose something."""
        removed = mask & ~kept
        is_lost = removed[mask]
        has_tokens = mask.any(-1)
        loses_tokens = removed.any(-1)[has_tokens]
        share_of_tokens = is_lost.float().mean()
        metrics[f"{prefix}_masked_fraction"] = float(share_of_tokens)
        share_of_responses = loses_tokens.float().mean()
        metrics[f"{prefix}_seq_masked_fraction"] = float(share_of_responses)

    if not mask.any():
        return response_mask, {}
    with torch.no_grad():
        d = zero_masked(log_ratio, mask).clamp(-20.0, 20.0)
        k2 = d.square() / 2
        k3 = d.exp() - d - 1
        divergences = {"k1": -d, "k2": k2, "k3": k3}
        for name, (lower, upper) in bounds.items():
            level, _, ending = name.rpartition("_")
            values = divergences[ending]
            if level == "seq_sum":
                row_sums = masked_sum(values, mask, axis=-1)
                values = row_sums.unsqueeze(-1).expand_as(d)
            elif level == "seq_mean":
                row_means = masked_mean(values, mask, axis=-1)
                values = row_means.unsqueeze(-1).expand_as(d)
            elif level == "seq_max":
                # k2 and k3 are never below 0, which they are where the mask is 0.
                values = values.amax(-1, keepdim=True).expand_as(d)
            if lower is None:
                is_kept = values <= upper
            else:
                is_high_enough = values >= math.log(lower)
                is_low_enough = values <= math.log(upper)
                is_kept = is_high_enough & is_low_enough
            kept &= is_kept
            prefix = f"rollout_rs_{name}"
            counted = values[mask]
            metrics[f"{prefix}_mean"] = float(counted.mean())
            metrics[f"{prefix}_max"] = float(counted.max())
            metrics[f"{prefix}_min"] = float(counted.min())
            add_shares(is_kept, prefix)
        add_shares(kept, "rollout_rs")
    return kept.to(response_mask.dtype), metrics
