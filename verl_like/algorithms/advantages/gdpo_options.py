"""The options of `gdpo`."""

from collections.abc import Collection
from typing import Annotated, ClassVar, Self

from pydantic import Strict, model_validator

from verl_like.algorithms.advantages import AdvantageOptions


class GDPOOptions(AdvantageOptions):
    """Which rewards, and their weights."""

    section: ClassVar[str] = "algorithm"

    gdpo_reward_keys: Annotated[tuple[str, ...], Strict(False)] = ()
    """The names of the rewards: their columns, such as rule_scores, or of numbers that the reward
    function returns."""
    gdpo_reward_weights: Annotated[tuple[float, ...], Strict(False)] = ()
    """One weight for each of gdpo_reward_keys; empty: each weighs 1."""

    @model_validator(mode="after")
    def _rewards_are_named_once_with_a_weight_each(self) -> Self:
        keys = self.gdpo_reward_keys
        weights = self.gdpo_reward_weights
        if not keys:
            raise ValueError(
                "algorithm.gdpo_reward_keys is empty, but the estimator gdpo adds up several "
                "rewards: name them, e.g. [rule_scores,format] where the reward function returns "
                "a number named format"
            )
        if weights and len(weights) != len(keys):
            raise ValueError(
                f"algorithm.gdpo_reward_weights has {len(weights)} weights for the {len(keys)} "
                "rewards of algorithm.gdpo_reward_keys: give one weight for each, in the same "
                "order"
            )
        if len(set(keys)) < len(keys):
            raise ValueError(
                f"algorithm.gdpo_reward_keys={list(keys)} names a reward twice: use a weight of 2"
            )
        return self

    def require_rewards(self, names: Collection[str]) -> None:
        unknown = [key for key in self.gdpo_reward_keys if key not in names]
        if unknown:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {', '.join(unknown)}, but the rewards of this "
                f"run are {', '.join(names)}: name those"
            )
