"""On-policy distillation: PPO whose advantage is how much likelier the teacher finds each token
than the policy.

thinkingmachines.ai/blog/on-policy-distillation; the supervised form is arXiv 2306.13649. With `k =
log_prob - teacher_log_prob`, without its gradient, which estimates KL(policy || teacher), and with
the loss `vanilla` of the advantages A:

    L = distillation_loss_coef vanilla(-clip(k, -loss_max_clamp, loss_max_clamp))
    L = L + vanilla(A)                            with use_task_rewards

| metric | meaning |
|---|---|
| `distillation/abs_loss` | mean of `abs(k)` |
| `distillation/kl` | mean of k |
| `distillation/pg_clipfrac`, `_lower` | as in `vanilla`, of the first line |
| `actor/...` | those of `vanilla`, of the second line |
| `actor/ppo_kl` | mean of `old_log_prob - log_prob`, each clamped to [-20, 20] |

Keys under `actor_rollout_ref.actor`: those of `vanilla`. The teacher shares the tokenizer of the
policy and runs in the role `teacher`; a custom role that writes `teacher_log_prob` may take its
place. In verl these options stand in the block `distillation.distillation_loss`, and this is its
`loss_mode=k1` with `use_policy_gradient`; there distillation_loss_coef counts only with
use_task_rewards. A KL to another model as a term of the loss, with the estimators k2 and k3, is
`actor.use_kl_loss`.
"""

from torch import Tensor

from verl_like.algorithms.aggregation import BatchCounts
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import LossConfig, register_policy_loss
from verl_like.algorithms.policy_losses.distillation_options import DistillationOptions
from verl_like.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla


@register_policy_loss("distillation")
def compute_policy_loss_distillation(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: BatchCounts,
    teacher_log_prob: Tensor,
    options: DistillationOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a micro-batch, and its metrics by token, (B, R). The arguments are as in
    `PolicyLossInputs`."""

    def surrogate(advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss `vanilla` of these advantages, and its metrics."""
        return compute_policy_loss_vanilla(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            loss_agg_mode,
            config,
            rollout_is_weights,
            counts=counts,
        )

    reverse_kl = zero_masked(log_prob.detach() - teacher_log_prob, response_mask)
    bound = options.loss_max_clamp
    bounded_kl = reverse_kl if bound is None else reverse_kl.clamp(-bound, bound)
    loss, teacher_metrics = surrogate(-bounded_kl)
    loss = options.distillation_loss_coef * loss
    metrics = {
        name.replace("actor/", "distillation/"): value for name, value in teacher_metrics.items()
    }
    metrics["actor/ppo_kl"] = metrics.pop("distillation/ppo_kl")
    metrics["distillation/abs_loss"] = reverse_kl.abs()
    metrics["distillation/kl"] = reverse_kl
    if options.use_task_rewards:
        task_loss, task_metrics = surrogate(advantages)
        loss = loss + task_loss
        metrics = metrics | task_metrics
    return loss, metrics
