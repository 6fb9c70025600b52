"""Entropy of the policy, from full logits.

B rows, R padded response length, V vocabulary size.
"""

import torch

from verl_like.algorithms.aggregation import Aggregate
from verl_like.algorithms.masked import zero_masked


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Shannon entropy in nats of softmax(logits) over the last axis: (..., V) float -> (...)."""
    expected_logit = (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return torch.logsumexp(logits, dim=-1) - expected_logit


def compute_entropy_loss(logits: torch.Tensor, response_mask: torch.Tensor, *, aggregate: Aggregate) -> torch.Tensor:
    """Aggregated token entropy; the actor subtracts `entropy_coeff` times this from its loss.

    With the entropy per token at hand, call `aggregate(entropy, response_mask)` instead.

    Args:
        logits: (B, R, V) float.
        response_mask: (B, R) bool or 0/1.
        aggregate: `agg_loss` with its counts bound.
    """
    return aggregate(entropy_from_logits(zero_masked(logits, response_mask.unsqueeze(-1))), response_mask)
