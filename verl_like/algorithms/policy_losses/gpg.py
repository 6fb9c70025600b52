"""Group policy gradient: the plain policy gradient, without ratio, clip or KL (GPG, arXiv
2504.02546).

    L = -A log_prob

It belongs to the advantages of the estimator of the same name. There are no metrics.
"""

from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""
    losses = -advantages * zero_masked(log_prob, response_mask)
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, {}
