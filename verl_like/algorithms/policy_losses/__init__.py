"""Policy losses: `actor.policy_loss.loss_mode=<name>` is the function registered in the file
`<name>.py` here.

Shapes: B rows, R padded response length. A loss has verl's signature. It returns a scalar, this
micro-batch's share of the mini-batch's loss (`agg_loss` makes it), and metrics. A metric is (B, R),
averaged over the selected tokens; (B,), averaged over the rows that have tokens; or a number or 0-d
tensor, the mean of this micro-batch, weighted by its tokens. In the formulas L is the loss of a
token and A its advantage. A loss's inputs are given by parameter name: `INPUTS` and
docs/algorithms.md say what they are.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from verl_like.algorithms.registry import AlgorithmOptions, AlgorithmRegistry

INPUTS = {
    "old_log_prob": "(B, R) float, log-probabilities under the policy before the update",
    "log_prob": "(B, R) float, log-probabilities under the policy that is trained; the gradient "
    "flows here",
    "advantages": "(B, R) float",
    "response_mask": "(B, R) bool or 0/1, the tokens that count",
    "loss_agg_mode": "actor.loss_agg_mode, for `agg_loss`",
    "rollout_is_weights": "(B, R) float, importance weights of algorithm.rollout_correction",
    "entropy": "(B, R) float, entropy of the policy at each token, with its gradient",
    "ref_log_prob": "(B, R) float, log-probabilities under the reference policy; the run then has "
    "one",
    "teacher_log_prob": "(B, R) float, log-probabilities under the teacher; the run then has one",
    "rollout_log_probs": "(B, R) float, log-probabilities of the responses as the rollout engine "
    "gave them",
    "selected_tokens": "(B, R) bool, what `options.select_tokens(old_log_probs, advantages, "
    "response_mask, generator)` "
    "returned for the whole batch, before the update",
}
"""What a loss may have as parameters, besides `config` (see `LossConfig`) and `options` (its
own)."""

POLICY_LOSSES = AlgorithmRegistry(
    "policy loss", __name__, "register_policy_loss", frozenset(INPUTS)
)
register_policy_loss = POLICY_LOSSES.register
get_policy_loss_fn = POLICY_LOSSES.get


class LossConfig(Protocol):
    """What a loss reads as `config`: the block `actor_rollout_ref.actor`, and the counts of the
    mini-batch."""

    clip_ratio: float
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    policy_loss: Any
    global_batch_info: Mapping[str, Any]
    """The counts among the arguments of `agg_loss`."""


class PolicyLossOptions(AlgorithmOptions):
    """Base of a loss's own options."""

    section: ClassVar[str] = "actor_rollout_ref.actor.policy_loss"
