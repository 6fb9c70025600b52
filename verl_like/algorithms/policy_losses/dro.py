"""Direct reward optimization: the policy gradient with a quadratic penalty on the log-ratio (DRO,
arXiv 2405.19107).

    L = -(A log_prob - (dro_beta / 2) (log_prob - old_log_prob)^2)

| metric | meaning |
|---|---|
| `actor/ppo_kl` | mean of `old_log_prob - log_prob` |

The paper learns a value function beside it; here the advantage estimator takes its place, as in
verl. The penalty is on the distance from the policy before the update.
"""

from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss
from verl_like.algorithms.policy_losses.dro_options import DroOptions


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
    options: DroOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""
    log_prob = zero_masked(log_prob, response_mask)
    log_ratio = log_prob - old_log_prob
    assert options.dro_beta is not None
    penalty = 0.5 * options.dro_beta * log_ratio.square()
    losses = penalty - advantages * log_prob

    metrics = {"actor/ppo_kl": -log_ratio.detach()}
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
