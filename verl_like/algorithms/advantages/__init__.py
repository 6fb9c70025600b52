"""Advantage estimators: `algorithm.adv_estimator=<name>` is the function registered in the file
`<name>.py` here.

Shapes: B rows, R padded response length. An estimator returns advantages (B, R) and returns (B, R),
both 0 where response_mask is 0 and without a gradient; it writes into none of its inputs. A row
without any response token was skipped and counts in no statistic. Its inputs are given by parameter
name: `INPUTS` and docs/algorithms.md say what they are.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from verl_like.algorithms.advantages._facts import FACTS
from verl_like.algorithms.registry import (
    Algorithm,
    AlgorithmOptions,
    AlgorithmRegistry,
    call_by_name,
)

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = {
    "token_level_rewards": "(B, R) float, the reward of each token, after the KL penalty",
    "response_mask": "(B, R) bool or 0/1, the tokens that count",
    "values": "(B, R) float, the critic's predictions; the run then has a critic",
    "index": "(B,) hashable objects, equal for the responses to one prompt; rollout.n is then at "
    "least 2",
    "reward_baselines": "(B,) float, the reward of a greedy response to the same prompt",
    "old_log_probs": "(B, R) float, log-probabilities of the responses under the policy before the "
    "update",
    "rollout_log_probs": "(B, R) float, log-probabilities of the responses as the rollout engine "
    "gave them",
    "ref_log_prob": "(B, R) float, log-probabilities under the reference policy; the run then has "
    "one",
    "sum_pi_squared": "(B, R) float, sum over the vocabulary of the policy's squared probabilities "
    "at each token",
    "rollout_is_weights": "(B, R) float, importance weights of algorithm.rollout_correction",
    "scores_by_reward": "dict of (B, R) float, each reward before they are added up, by the name "
    "of its column; "
    "NaN on the last token where a row lacks it",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo",
}
"""What an estimator may have as parameters, besides `config` (the `algorithm` block) and `options`
(its own)."""

ADVANTAGE_ESTIMATORS = AlgorithmRegistry(
    "advantage estimator",
    __name__,
    "register_adv_est",
    frozenset(INPUTS),
    FACTS,
    # In verl these compute the same without a loop over the groups.
    aliases={"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
)
register_adv_est = ADVANTAGE_ESTIMATORS.register
get_adv_estimator_fn = ADVANTAGE_ESTIMATORS.get


class AdvantageOptions(AlgorithmOptions):
    """Base of an estimator's own options."""

    section: ClassVar[str] = "algorithm.options"

    def require_rewards(self, names: Collection[str]) -> None:
        """Raises ValueError for an option that names a reward which is none of `names`."""


def estimate_advantages(estimator: Algorithm, inputs: Mapping[str, Any]) -> "tuple[Tensor, Tensor]":
    """Advantages (B, R) and returns (B, R) of `estimator`, which gets those of `inputs` that it has
    parameters for.

    Raises:
        ValueError: an input it needs is not there, or has another shape than the rewards, or
            another number of rows.
    """
    shape = tuple(inputs["token_level_rewards"].shape)
    parameters = inspect.signature(estimator).parameters
    for name in parameters.keys() & INPUTS.keys():
        # A number has no shape, and neither has a dict of rewards.
        own_shape = tuple(getattr(inputs.get(name), "shape", ()))
        num_dims = len(own_shape)
        if num_dims in (1, 2) and own_shape != shape[:num_dims]:
            raise ValueError(
                f"{name} has shape {own_shape} but token_level_rewards has {shape}: an input "
                "by token must be (B, R), one by row (B,)"
            )
    return call_by_name(estimator, inputs)
