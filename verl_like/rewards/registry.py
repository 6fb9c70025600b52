"""The registry of reward functions by data source."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

RewardFn = Callable[..., Any]
MAX_SCORE = 3.4e38  # scores become float32

_REWARD_FNS: dict[str, RewardFn] = {}


def register_reward(*data_sources: str) -> Callable[[RewardFn], RewardFn]:
    """Decorator that registers a reward function for data sources. The name of a data source may be
    a shell pattern such as `lighteval/*`.

    Raises ValueError if one of the names is registered already.
    """

    def decorate(reward_fn: RewardFn) -> RewardFn:
        for data_source in data_sources:
            if data_source in _REWARD_FNS:
                raise ValueError(
                    f"data source {data_source!r} has the reward "
                    f"{_REWARD_FNS[data_source].__module__} already: register "
                    f"{reward_fn.__module__} under another name"
                )
            _REWARD_FNS[data_source] = reward_fn
        return reward_fn

    return decorate


def get_reward_fn(data_source: str) -> RewardFn:
    """The reward function for a data source: the one registered for its exact name or else for the
    first pattern that matches. Raises ValueError if there is none."""
    if data_source in _REWARD_FNS:
        return _REWARD_FNS[data_source]
    for pattern, reward_fn in _REWARD_FNS.items():
        if fnmatchcase(data_source, pattern):
            return reward_fn
    raise ValueError(
        f"no reward is registered for data_source {data_source!r} (registered: "
        f"{', '.join(sorted(_REWARD_FNS))}): set custom_reward_function.path and "
        "custom_reward_function.name, or correct the rows' data_source"
    )
