"""KL divergence: per-token estimators, the penalty inside the reward, and the controllers of its
coefficient.

B rows, R padded response length.
"""

import math
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_mean, zero_masked

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Every name also exists with a "+" suffix: same value, gradient of k2."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Returns an estimate of KL(policy || reference) per token from samples of the policy (Schulman
    2020, "Approximating KL").

    With d = logprob - ref_logprob:

    | name | value |
    |---|---|
    | kl, k1 | d |
    | abs | abs(d) |
    | mse, k2 | d^2 / 2 |
    | low_var_kl, k3 | exp(-d) + d - 1, with d clamped to [-20, 20] and the result to [-10, 10] |

    k1 and k3 are unbiased in value, but the gradient of their mean is not the gradient of the KL;
    k2's is. The suffix "+" (for example "k3+") keeps the named value and takes k2's gradient
    (straight-through).

    Args:
        logprob, ref_logprob: same shape, float, log-probabilities of the sampled tokens.
        kl_penalty: estimator name.

    Raises:
        ValueError: unknown name; "full", which needs the logits of the whole vocabulary.
    """
    estimator = kl_penalty.removesuffix("+")
    if estimator not in KL_ESTIMATORS:
        reason = " (it needs the logits of the whole vocabulary)" if estimator == "full" else ""
        raise ValueError(
            f"unknown KL estimator {kl_penalty!r}{reason}: choose one of "
            f"{', '.join(KL_ESTIMATORS)}, each also with the suffix '+' for the gradient of k2"
        )
    difference = logprob - ref_logprob
    if estimator in ("kl", "k1"):
        value = difference
    elif estimator == "abs":
        value = difference.abs()
    elif estimator in ("mse", "k2"):
        value = 0.5 * difference.square()
    else:
        bounded = difference.clamp(-20, 20)
        low_variance = torch.exp(-bounded) + bounded - 1
        value = low_variance.clamp(-10, 10)
    if not kl_penalty.endswith("+"):
        return value
    with_k2_gradient = 0.5 * difference.square()
    return with_k2_gradient - with_k2_gradient.detach() + value.detach()


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    estimator: str,
) -> tuple[Tensor, float]:
    """Subtracts kl_coef times the KL estimate from the reward, per token
    (`algorithm.use_kl_in_reward`).

    Args:
        token_level_scores, old_log_probs, ref_log_prob: (B, R) float.
        response_mask: (B, R) bool or 0/1.
        kl_coef: the controller's present `value`.
        estimator: name for `kl_penalty`.

    Returns:
        token_level_rewards (B, R), 0 outside the mask, and the KL to report and to give to the
        controller's `update`: the mean over rows of the row's token mean; rows without any response
        token do not count.
    """
    with torch.no_grad():
        kl = kl_penalty(old_log_probs, ref_log_prob, estimator)
        kl = zero_masked(kl, response_mask)
        rewards = zero_masked(token_level_scores, response_mask) - kl_coef * kl
        row_kl = masked_mean(kl, response_mask, axis=-1)
        has_tokens = response_mask.bool().any(dim=-1)
        current_kl = masked_mean(row_kl, has_tokens)
    return rewards, float(current_kl)


class FixedKLController:
    """A coefficient that stays what the configuration says."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """Steers the coefficient so that the measured KL approaches a target (Ziegler et al., arXiv
    1909.08593).

    value <- value * (1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon)

    Raises:
        ValueError: target_kl or horizon not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float = 10_000.0) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"adaptive KL control got target_kl={target_kl}, horizon={horizon}: both are "
                "divisors and must be positive; set them so or use type 'fixed'"
            )
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Moves the coefficient after a step that measured `current_kl` over `n_steps` samples.

        Raises:
            ValueError: current_kl is not finite, which would spoil the coefficient for the rest of
                the run.
        """
        if not math.isfinite(current_kl):
            raise ValueError(
                f"measured KL is {current_kl}, expected a finite number: the coefficient would "
                "stay broken for the rest of the run; look for non-finite old_log_probs or "
                "ref_log_prob"
            )
        error = current_kl / self.target - 1
        bounded = min(max(error, -0.2), 0.2)
        self.value *= 1 + bounded * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """Returns the controller that `kl_ctrl.type` names, "fixed" or "adaptive"; `kl_ctrl` is the
    block `algorithm.kl_ctrl`.

    Raises:
        ValueError: any other type.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl)
    raise ValueError(f"unknown kl_ctrl.type {kl_ctrl.type!r}: choose 'fixed' or 'adaptive'")
