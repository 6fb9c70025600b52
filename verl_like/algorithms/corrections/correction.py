"""The configured corrections of a batch, composed."""

from torch import Tensor

from verl_like.algorithms.corrections import RolloutCorrectionConfig
from verl_like.algorithms.corrections.importance_sampling import compute_rollout_correction_weights
from verl_like.algorithms.corrections.rejection import compute_rollout_rejection_mask


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Returns the weights (B, R) or None, the narrower mask (B, R), and the metrics, under
    `rollout_corr/`.

    Weights and rejection are both made from the whole mask, and the metrics are means over it.
    verl's function of this name takes the fields of `config` one by one, returns the weights in a
    DataProto, and adds the metrics of off_policy_metrics.py, which here every step has.

    Args:
        old_log_prob: (B, R) float, the trainer's log-probabilities before the update.
        rollout_log_prob: (B, R) float, those of the engine that sampled.
        response_mask: (B, R) bool or 0/1.
        config: the block `algorithm.rollout_correction`.
    """
    log_ratio = old_log_prob - rollout_log_prob
    weights = None
    kept = response_mask
    metrics: dict[str, float] = {}
    if config.rollout_is:
        weights, of_weights = compute_rollout_correction_weights(
            log_ratio,
            response_mask,
            config.rollout_is,
            config.rollout_is_threshold,
            config.rollout_is_batch_normalize,
        )
        metrics |= of_weights
    if config.rollout_rs:
        kept, of_rejection = compute_rollout_rejection_mask(
            log_ratio, response_mask, config.rollout_rs, config.rollout_rs_threshold
        )
        metrics |= of_rejection
    named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    return weights, kept, named
