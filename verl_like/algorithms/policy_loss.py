"""Policy losses: the registry, and the clipped PPO objective with dual clip.

B rows, R padded response length. To add a loss, decorate a function of the PolicyLossFn shape with
`@register_policy_loss("name")` and set `actor_rollout_ref.actor.policy_loss.loss_mode=name`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from verl_like.algorithms.aggregation import Aggregate
from verl_like.algorithms.masked import masked_sum, zero_masked


@dataclass(frozen=True)
class ClipRange:
    """The trust region [1 - low, 1 + high] of the probability ratio, and the dual-clip bound c for negative advantages.

    Raises:
        ValueError: low or high negative, c not above 1.
    """

    low: float
    """actor.clip_ratio_low"""
    high: float
    """actor.clip_ratio_high"""
    c: float
    """actor.clip_ratio_c"""

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(
                f"clip_ratio_low={self.low} and clip_ratio_high={self.high} must not be negative: the ratio of an "
                "unchanged policy is 1 and has to lie inside the range; 0.2 is the usual value"
            )
        if not self.c > 1:
            raise ValueError(
                f"clip_ratio_c={self.c} must be above 1: a lower bound would clip an unchanged policy; "
                "3.0 is the usual value"
            )


class PolicyLossFn(Protocol):
    """A policy loss: returns the aggregated scalar and metrics as sums over the selected tokens of this micro-batch.

    The sums are scalars on the device of the loss: reading one would wait for the device in every micro-batch.
    """

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        *,
        clip: ClipRange,
        aggregate: Aggregate,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


POLICY_LOSSES: dict[str, PolicyLossFn] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: makes a PolicyLossFn known as `name`.

    Raises:
        ValueError: the name is taken.
    """

    def decorator(function: PolicyLossFn) -> PolicyLossFn:
        if name in POLICY_LOSSES:
            raise ValueError(
                f"policy loss {name!r} is already registered ({POLICY_LOSSES[name]!r}): choose another name"
            )
        POLICY_LOSSES[name] = function
        return function

    return decorator


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The loss registered as `name`.

    Raises:
        ValueError: no such loss; the message lists the known ones.
    """
    if name not in POLICY_LOSSES:
        raise ValueError(
            f"unknown policy loss {name!r}: known are {', '.join(sorted(POLICY_LOSSES))}; "
            "add one with @register_policy_loss"
        )
    return POLICY_LOSSES[name]


@register_policy_loss("vanilla")
def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip: ClipRange,
    aggregate: Aggregate,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped PPO surrogate (Schulman et al., arXiv 1707.06347) with dual clip (Ye et al., arXiv 1912.09729).

    With r = exp(log_prob - old_log_prob), the exponent clamped to [-20, 20], and A the advantage, a token's loss is
    L = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 it is min(L, -A c).

    Args:
        old_log_prob: (B, R) float, log-probabilities of the responses under the policy the advantages belong to.
        log_prob: (B, R) float, the same under the policy that is trained; the gradient flows here.
        advantages: (B, R) float.
        response_mask: (B, R) bool or 0/1.
        clip: the clip range.
        aggregate: `agg_loss` with its counts bound.

    Returns:
        The scalar loss, and sums over the selected tokens; divided by the token count they are the verl metrics
        "actor/pg_clipfrac" (clipping raised the loss), "actor/ppo_kl" (old_log_prob - log_prob) and
        "actor/pg_clipfrac_lower" (the dual clip bounded the loss).
    """
    log_ratio = (zero_masked(log_prob, response_mask) - old_log_prob).clamp(-20.0, 20.0)
    ratio = torch.exp(log_ratio)

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    surrogate = torch.maximum(unclipped, clipped)
    bound = -advantages * clip.c
    losses = torch.where(advantages < 0, torch.minimum(surrogate, bound), surrogate)

    with torch.no_grad():
        sums = {
            "actor/pg_clipfrac": masked_sum((clipped > unclipped).float(), response_mask),
            "actor/ppo_kl": masked_sum(-log_ratio.float(), response_mask),
            "actor/pg_clipfrac_lower": masked_sum(((surrogate > bound) & (advantages < 0)).float(), response_mask),
        }
    return aggregate(losses, response_mask), sums
