"""Rollout engines: `build_rollout_engine` makes the one that the configuration names."""

from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout.base import FinishedSample, RolloutEngine, RolloutError
from verl_like.workers.rollout.hf_engine import HfEngine
from verl_like.workers.rollout.vllm_engine import VllmEngine

__all__ = ["FinishedSample", "RolloutEngine", "RolloutError", "build_rollout_engine"]

_ENGINES: dict[str, type[RolloutEngine]] = {"hf": HfEngine, "vllm": VllmEngine}


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
    return _ENGINES[config.name](config, model, rank=rank, world_size=world_size, seed=seed, device=device)
