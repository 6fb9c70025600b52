"""Rollout engines: `build_rollout_engine` makes the one that the configuration names."""

from collections.abc import Callable
from typing import TypeVar

from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout.base import FinishedSample, RolloutEngine, RolloutError
from verl_like.workers.rollout.hf_engine import HfEngine
from verl_like.workers.rollout.vllm_engine import VllmEngine

__all__ = [
    "FinishedSample",
    "RolloutEngine",
    "RolloutError",
    "build_rollout_engine",
    "get_rollout_engine",
    "register_rollout_engine",
]

_ENGINES: dict[str, type[RolloutEngine]] = {"hf": HfEngine, "vllm": VllmEngine}
EngineT = TypeVar("EngineT", bound=RolloutEngine)


def register_rollout_engine(name: str) -> Callable[[type[EngineT]], type[EngineT]]:
    """Decorator of a plugin: makes an engine known as `rollout.name=<name>`.

    Raises:
        ValueError: the name is taken.
    """

    def decorator(engine: type[EngineT]) -> type[EngineT]:
        if name in _ENGINES:
            raise ValueError(f"rollout engine {name!r} is already registered ({_ENGINES[name]}): choose another name")
        _ENGINES[name] = engine
        return engine

    return decorator


def get_rollout_engine(name: str) -> type[RolloutEngine]:
    """The engine known as `name`.

    Raises:
        ValueError: there is none; the message lists the known ones.
    """
    if name not in _ENGINES:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={name}: there is no such engine, only {', '.join(sorted(_ENGINES))}; a "
            "plugin adds one with @register_rollout_engine"
        )
    return _ENGINES[name]


def build_rollout_engine(
    config: RolloutConfig, model: TrainedModelConfig, *, rank: int, world_size: int, seed: int, device: str
) -> RolloutEngine:
    """Starts the engine `config.name` in this process, without weights: call `load_weights` before generating.

    Args:
        config: which engine, and how it samples.
        model: architecture and tokenizer.
        rank: this process among the `world_size` processes of the rollout's group. With
            `tensor_model_parallel_size` > 1 all of them must call this at the same time.
        seed: the run's seed.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: a setting that does not fit the model, the device or the number of processes.
        ModuleNotFoundError: the engine's package is not installed; the message says what to install.
    """
    return get_rollout_engine(config.name)(config, model, rank=rank, world_size=world_size, seed=seed, device=device)
