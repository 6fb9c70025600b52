"""How far the policy that is trained is from the one that sampled the responses.

With `d = old_log_probs - rollout_log_probs` and `r = exp(d)` of a token:

| metric | meaning |
|---|---|
| `rollout_corr/kl`, `k3_kl` | KL of the rollout to the trainer: mean of -d, and of r - d - 1 |
| `rollout_corr/training_ppl`, `rollout_ppl` | mean over responses of the perplexity under each |
| `rollout_corr/log_ppl_diff`, `_abs_diff` | mean over responses of mean(-d), and of abs(mean(-d)) |
| `rollout_corr/ppl_ratio` | mean over responses of exp(mean(-d)) |
| `rollout_corr/chi2_token` | mean over tokens of r^2 - 1 |
| `rollout_corr/chi2_seq` | mean over responses of (product of r)^2 - 1 |
| `rollout_corr/drift_p50`, `drift_p99`, `drift_max` | quantiles of abs(d) over tokens |

The two chi2 are the variances of untruncated weights, of tokens and of responses. For them d, and
its sum over a response, are clamped to [-20, 20].
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_mean, masked_sum, zero_masked


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Returns the metrics without the prefix. There are none for a batch without tokens.

    Args:
        old_log_prob: (B, R) float, the trainer's log-probabilities before the update.
        rollout_log_prob: (B, R) float, those of the engine that sampled.
        response_mask: (B, R) bool or 0/1; rows without any token do not count.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    with torch.no_grad():
        difference = old_log_prob - rollout_log_prob
        d = zero_masked(difference, mask)
        rows = mask.any(-1)
        of_tokens = d[mask]
        sums = masked_sum(d, mask, axis=-1)
        of_rows = sums[rows]

        def row_mean(values: Tensor) -> Tensor:
            return masked_mean(values, mask, axis=-1)[rows]

        def mean_square_ratio(log_ratios: Tensor) -> Tensor:
            clamped = log_ratios.clamp(-20.0, 20.0)
            squares = (2 * clamped).exp()
            return squares.mean()

        log_ppl_diff = row_mean(-d)
        training_ppl = row_mean(-old_log_prob).exp()
        rollout_ppl = row_mean(-rollout_log_prob).exp()
        k3 = of_tokens.exp() - of_tokens - 1
        metrics: dict[str, Any] = {
            "kl": -of_tokens.mean(),
            "k3_kl": k3.mean(),
            "training_ppl": training_ppl.mean(),
            "rollout_ppl": rollout_ppl.mean(),
            "log_ppl_diff": log_ppl_diff.mean(),
            "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
            "ppl_ratio": log_ppl_diff.exp().mean(),
            "chi2_token": mean_square_ratio(of_tokens) - 1,
            "chi2_seq": mean_square_ratio(of_rows) - 1,
        }
        drift = of_tokens.abs().numpy(force=True)
    median, p99, largest = np.quantile(drift, [0.5, 0.99, 1.0])
    metrics |= {"drift_p50": median, "drift_p99": p99, "drift_max": largest}
    return {name: float(value) for name, value in metrics.items()}
