"""REINFORCE: the plain policy gradient, without ratio, clip or KL (Williams 1992; arXiv
2402.14740).

    L = -A log_prob

| metric | meaning |
|---|---|
| `actor/ppo_kl` | mean of `old_log_prob - log_prob` |

It differs from `gpg` in its metric. With `algorithm.rollout_correction.rollout_is` it is the policy
gradient with truncated importance weights. The papers take the mean over responses of the sum over
tokens, `loss_agg_mode=seq-mean-token-sum`; the gradient of token-mean points the same way. In verl
the function has no name for `loss_mode`, and its first parameter is called rollout_log_prob.
"""

from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss


@register_policy_loss("reinforce")
def compute_policy_loss_reinforce(
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
    log_prob = zero_masked(log_prob, response_mask)
    losses = -advantages * log_prob

    metrics = {"actor/ppo_kl": (old_log_prob - log_prob).detach()}
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, metrics
