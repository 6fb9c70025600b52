"""vLLM without a prefix cache, a plugin."""

from typing import Any

from verl_like.workers.rollout import register_rollout_engine
from verl_like.workers.rollout.vllm_engine import VllmEngine


@register_rollout_engine("vllm_uncached")
class UncachedEngine(VllmEngine):
    """Computes each prompt anew. All else is as in the engine of the project."""

    def _make(self, **arguments: Any) -> Any:
        return super()._make(**arguments | {"enable_prefix_caching": False})
