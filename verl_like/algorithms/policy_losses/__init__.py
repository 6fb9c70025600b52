"""Policy losses: `actor.policy_loss.loss_mode=<name>` is the function registered in the file
`<name>.py` here.

Shapes: B rows, R padded response length. The first parameters of a loss here are those of verl, in
their order, and further ones are given by name. It returns a scalar, this micro-batch's share of
the mini-batch's loss (`agg_loss` makes it), and metrics. A metric is (B, R),
averaged over the selected tokens; (B,), averaged over the rows that have tokens; or a number or 0-d
tensor, the mean of this micro-batch, weighted by its tokens. In the formulas L is the loss of a
token and A its advantage. A loss gets the fields of `PolicyLossInputs` by the names of
its parameters.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from verl_like.algorithms.policy_losses._facts import FACTS
from verl_like.algorithms.registry import (
    Algorithm,
    AlgorithmOptions,
    AlgorithmRegistry,
    described_fields,
)

if TYPE_CHECKING:
    from torch import Tensor

    from verl_like.algorithms.aggregation import BatchCounts


class LossConfig(Protocol):
    """What a loss reads as `config`: keys of the block `actor_rollout_ref.actor`."""

    clip_ratio: float
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    policy_loss: Any

    @property
    def global_batch_info(self) -> Mapping[str, Any]:
        """The same as `counts.arguments`, for losses that were written for verl."""
        ...


@dataclass(frozen=True)
class ConfigBesideCounts:
    """A `LossConfig`: a configuration and the counts of a mini-batch, of which neither is copied.

    Any name other than its own fields is read from `block`.
    """

    block: Any
    """The block `actor_rollout_ref.actor`."""
    global_batch_info: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for special methods before `block` is there.
        if name == "block" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.block, name)

    def updated(self, values: Mapping[str, Any]) -> "ConfigBesideCounts":
        """Returns the same counts beside the block with other values."""
        return replace(self, block=self.block.updated(values))

    def model_copy(self, **options: Any) -> "ConfigBesideCounts":
        """Returns the same counts beside a copy of the block, as pydantic makes it."""
        return replace(self, block=self.block.model_copy(**options))


class PolicyLossOptions(AlgorithmOptions):
    """Base of a loss's own options."""

    section: ClassVar[str] = "actor_rollout_ref.actor.policy_loss"


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """What a loss may have as parameters. One that is None is not there in this run."""

    old_log_prob: Annotated[
        "Tensor", "(B, R) float, log-probabilities under the policy before the update"
    ]
    log_prob: Annotated[
        "Tensor",
        "(B, R) float, log-probabilities under the policy that is trained; the gradient flows here",
    ]
    advantages: Annotated["Tensor | None", "(B, R) float"] = None
    response_mask: Annotated["Tensor", "(B, R) bool or 0/1, the tokens that count"]
    loss_agg_mode: Annotated[str, "actor.loss_agg_mode, for `agg_loss`"]
    counts: Annotated[
        "BatchCounts",
        "the counts of the mini-batch over all ranks, for `agg_loss(..., **counts.arguments)`",
    ]
    rollout_is_weights: Annotated[
        "Tensor | None", "(B, R) float, importance weights of algorithm.rollout_correction"
    ] = None
    entropy: Annotated[
        "Tensor | None", "(B, R) float, entropy of the policy at each token, with its gradient"
    ] = None
    ref_log_prob: Annotated[
        "Tensor | None",
        "(B, R) float, log-probabilities under the reference policy; the run then has one",
    ] = None
    teacher_log_prob: Annotated[
        "Tensor | None", "(B, R) float, log-probabilities under the teacher; the run then has one"
    ] = None
    rollout_log_probs: Annotated[
        "Tensor | None",
        "(B, R) float, log-probabilities of the responses as the rollout engine gave them",
    ] = None
    selected_tokens: Annotated[
        "Tensor | None",
        "(B, R) bool, what `options.select_tokens(old_log_probs, advantages, response_mask, "
        "generator)` returned for the whole batch, before the update",
    ] = None
    config: LossConfig
    options: AlgorithmOptions | None
    """The loss's own options; None for a loss without any."""


COLUMNS = (
    "advantages",
    "rollout_is_weights",
    "ref_log_prob",
    "teacher_log_prob",
    "rollout_log_probs",
    "selected_tokens",
)
"""The inputs that are columns of the batch under the same name."""

INPUTS = described_fields(PolicyLossInputs)
"""What the inputs are, by name, but for `config` and `options`."""

POLICY_LOSSES = AlgorithmRegistry(
    "policy loss", __name__, "register_policy_loss", frozenset(INPUTS), FACTS
)
register_policy_loss = POLICY_LOSSES.register
get_policy_loss_fn = POLICY_LOSSES.get


def declared_columns(function: Algorithm) -> list[str]:
    """Returns those of COLUMNS that a loss has parameters for."""
    parameters = inspect.signature(function).parameters
    return [name for name in COLUMNS if name in parameters]
