"""Rollout engines: `get_rollout_engine` finds the one that the configuration names."""

from collections.abc import Callable
from typing import TypeVar

from verl_like.workers.rollout.base import RolloutEngine
from verl_like.workers.rollout.hf_engine import HfEngine
from verl_like.workers.rollout.request import (
    Completion,
    FinishedRequest,
    GenerationRequest,
    RolloutError,
    Sampling,
)
from verl_like.workers.rollout.vllm_async_engine import VllmAsyncEngine
from verl_like.workers.rollout.vllm_engine import VllmEngine

_ENGINES: dict[str, type[RolloutEngine]] = {
    "hf": HfEngine,
    "vllm": VllmEngine,
    "vllm_async": VllmAsyncEngine,
}
EngineT = TypeVar("EngineT", bound=RolloutEngine)


def register_rollout_engine(name: str) -> Callable[[type[EngineT]], type[EngineT]]:
    """Decorates an engine class of a plugin, and registers it as `rollout.name=<name>`.

    Raises ValueError if the name is taken.
    """

    def decorator(engine: type[EngineT]) -> type[EngineT]:
        if name in _ENGINES:
            raise ValueError(
                f"rollout engine {name!r} is already registered ({_ENGINES[name]}): choose another "
                "name"
            )
        _ENGINES[name] = engine
        return engine

    return decorator


def get_rollout_engine(name: str) -> type[RolloutEngine]:
    """Returns the engine class registered as `name`.

    Raises ValueError, which lists the registered names, if there is none.
    """
    if name not in _ENGINES:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={name}: there is no such engine, only "
            f"{', '.join(sorted(_ENGINES))}; a plugin adds one with @register_rollout_engine"
        )
    return _ENGINES[name]
