"""vLLM with one thread, and the same without a prefix cache, a plugin."""

from typing import Any

import torch

from verl_like.workers.rollout import register_rollout_engine
from verl_like.workers.rollout.vllm_engine import VllmEngine


@register_rollout_engine("vllm_one_thread")
class OneThreadEngine(VllmEngine):
    """Computes on one core, however many the group has. Threads that wait for each other would
    take CPU time too. All else is as in the engine of the project."""

    def _make(self, **arguments: Any) -> Any:
        torch.set_num_threads(1)
        return super()._make(**arguments)


@register_rollout_engine("vllm_uncached")
class UncachedEngine(OneThreadEngine):
    """Computes each prompt anew."""

    def _make(self, **arguments: Any) -> Any:
        return super()._make(**arguments | {"enable_prefix_caching": False})
