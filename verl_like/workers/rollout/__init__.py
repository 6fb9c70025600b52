"""Rollout engines: `get_rollout_engine` finds the one that the configuration names."""

from collections.abc import Callable
from typing import TypeVar

from verl_like.registry import Registry
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

ENGINES: Registry[type[RolloutEngine]] = Registry(
    "rollout engine",
    "register_rollout_engine",
    {"hf": HfEngine, "vllm": VllmEngine, "vllm_async": VllmAsyncEngine},
    taken="{kind} {name!r} is already registered ({present}): choose another name",
    unknown="actor_rollout_ref.rollout.name={name}: there is no such engine, only {known}; a "
    "plugin adds one with @{decorator}",
)
EngineT = TypeVar("EngineT", bound=RolloutEngine)


def register_rollout_engine(name: str) -> Callable[[type[EngineT]], type[EngineT]]:
    """Decorator of a plugin: makes an engine known as `rollout.name=<name>`; raises ValueError if
    the name is taken."""
    return ENGINES.register(name)


def get_rollout_engine(name: str) -> type[RolloutEngine]:
    """Returns the engine known as `name`; raises ValueError, which lists the known ones, if there
    is none."""
    return ENGINES.get(name)
