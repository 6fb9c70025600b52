"""Policy gradient with a KL penalty on the tokens that lower the entropy most (KL-Cov, arXiv
2505.22617).

Before the update, over the N response tokens of the whole batch, with the log-probabilities of the
policy before it:

    cov = (A - mean(A)) (old_log_prob - mean(old_log_prob))

The `max(1, floor(kl_cov_ratio N))` tokens of the largest covariance are selected. With `d =
log_prob - old_log_prob`, clamped to [-20, 20]:

    L = -A exp(d)                          on other tokens
    L = -A exp(d) + ppo_kl_coef |d|        on selected tokens

| metric | meaning |
|---|---|
| `actor/ppo_kl` | mean of `abs(old_log_prob - log_prob)`, each at most 20 |

There is no clip. verl selects the tokens in each micro-batch from the policy that is trained, so
its loss depends on the size of the micro-batches. This form gives the same loss for every size;
until the first optimizer step both have the same log-probabilities.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.masked import masked_mean, zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss
from verl_like.algorithms.policy_losses.kl_cov_options import KlCovKeys


class KlCovOptions(KlCovKeys):
    """The keys, and the choice of tokens that they describe."""

    def select_tokens(
        self,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns the tokens of a whole batch that take the penalty, (B, R) bool. It does not use
        `generator`."""
        deviation = advantages - masked_mean(advantages, response_mask)
        log_prob_deviation = old_log_probs - masked_mean(old_log_probs, response_mask)
        covariances = deviation * log_prob_deviation
        num_tokens = int(response_mask.sum())
        num_wanted = max(1, int(self.kl_cov_ratio * num_tokens))
        num_selected = min(num_wanted, num_tokens)
        of_tokens = covariances.masked_fill(~response_mask.bool(), -torch.inf)
        largest = of_tokens.flatten().topk(num_selected).indices
        selected = torch.zeros_like(response_mask, dtype=torch.bool).flatten()
        selected[largest] = True
        return selected.view_as(response_mask)


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
    selected_tokens: Tensor,
    options: KlCovOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""
    log_prob = zero_masked(log_prob, response_mask)
    log_ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0)
    distance = log_ratio.abs()
    penalty = options.ppo_kl_coef * distance * selected_tokens
    losses = penalty - advantages * torch.exp(log_ratio)
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, scale=rollout_is_weights, **counts.arguments
    )
    return loss, {"actor/ppo_kl": distance.detach()}
