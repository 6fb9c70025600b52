"""Advantage estimators, policy and value losses, KL: pure functions on tensors."""

from verl_like.algorithms.advantages import (
    AdvantageEstimatorFn,
    AdvantageInputs,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl_like.algorithms.aggregation import LOSS_AGG_MODES, Aggregate, agg_loss
from verl_like.algorithms.entropy_loss import compute_entropy_loss, entropy_from_logits
from verl_like.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    KLControl,
    KLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from verl_like.algorithms.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    on_last_token,
    zero_masked,
)
from verl_like.algorithms.policy_loss import (
    ClipRange,
    PolicyLossFn,
    compute_policy_loss,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl_like.algorithms.value_loss import compute_value_loss

__all__ = [
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "AdvantageEstimatorFn",
    "AdvantageInputs",
    "Aggregate",
    "ClipRange",
    "FixedKLController",
    "KLControl",
    "KLController",
    "PolicyLossFn",
    "agg_loss",
    "apply_kl_penalty",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss",
    "compute_value_loss",
    "entropy_from_logits",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "on_last_token",
    "register_adv_est",
    "register_policy_loss",
    "zero_masked",
]
