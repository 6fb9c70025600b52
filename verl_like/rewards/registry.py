"""The registry of reward functions by data source."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from verl_like.registry import Registry

RewardFn = Callable[..., Any]
MAX_SCORE = 3.4e38
"""The largest score, because scores become float32."""

REWARD_FNS: Registry[RewardFn] = Registry(
    "reward",
    "register_reward",
    taken="data source {name!r} has the reward {present.__module__} already: register "
    "{refused.__module__} under another name",
    unknown="no reward is registered for data_source {name!r} (registered: {known}): set "
    "custom_reward_function.path and custom_reward_function.name, or correct the rows' data_source",
)
"""The reward functions by data source or pattern, in the order in which they were registered."""


def register_reward(*data_sources: str) -> Callable[[RewardFn], RewardFn]:
    """Returns a decorator that registers a reward function for data sources. The name of a data
    source may be a shell pattern such as `lighteval/*`.

    Raises ValueError if one of the names is registered already.
    """

    def decorate(reward_fn: RewardFn) -> RewardFn:
        for data_source in data_sources:
            REWARD_FNS.add(data_source, reward_fn)
        return reward_fn

    return decorate


def get_reward_fn(data_source: str) -> RewardFn:
    """Returns the reward function of a data source. It is the one of this name, or else the one of
    the first registered pattern that matches. Raises ValueError if there is none."""
    if data_source not in REWARD_FNS.entries:
        for pattern, reward_fn in REWARD_FNS.entries.items():
            if fnmatchcase(data_source, pattern):
                return reward_fn
    return REWARD_FNS.get(data_source)
