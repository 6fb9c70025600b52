"""The routers of vLLM's models, whose routing is recorded.

vLLM imports this module in the process of its worker; nothing else imports it.
"""

from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from verl_like.workers.weights.vllm_loading import WorkerExtension


def routers_of(model: nn.Module) -> dict[int, BaseRouter]:
    """Returns the routers of vLLM's model by the numbers of their layers, in this order.

    Raises ValueError if there are none, or one that does not tell what it selects.
    """
    found = {}
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        layer = getattr(module, "layer_id", None)
        if layer is None or router is None:
            continue
        if not isinstance(router, BaseRouter):
            raise ValueError(
                f"vLLM's {type(router).__name__} in {name} does not tell which experts it "
                "selects; set actor_rollout_ref.actor.router_replay.mode=disabled or R2"
            )
        found[layer] = router
    if not found:
        raise ValueError(
            f"vLLM's {type(model).__name__} has no router, so there is no routing to replay; set "
            "actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    return dict(sorted(found.items()))


def routed_layers(model: nn.Module) -> tuple[list[int], int, int]:
    """Returns the numbers of the layers with a router, how many experts these have, and how many of
    them compute a token.

    Raises ValueError if `routers_of` does.
    """
    routers = routers_of(model)
    first = next(iter(routers.values()))
    return list(routers), first.global_num_experts, first.top_k


class RoutingExtension(WorkerExtension):
    """The extension of vLLM's worker, which also knows the routers of the model."""

    def routed_layers(self) -> tuple[list[int], int, int]:
        """Calls the function of this name."""
        return routed_layers(self.model_runner.get_model())
