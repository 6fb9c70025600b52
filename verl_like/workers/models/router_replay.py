"""Replays which experts the routers of a mixture of experts select, and records it.

A router scores all experts for each token and selects the k best by `topk`. Two computations of one
model may select others where scores are close, because they round differently, and then their
log-probabilities differ by far more than the rounding (arXiv:2510.11370). With replay the trainer
computes a token with the experts that were selected for it elsewhere.

Only the result of the selecting `topk` is replaced: by the given ids, and the scores of these. All
else is the router's own, so its normalisation stays, and it learns by the scores.
"""

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from verl_like.workers.models.packed_models import decoder_layers
from verl_like.workers.models.routed_experts import (
    OWN,
    ROUTING_ARGUMENT,
    SWITCH_OFF,
    RouterShape,
    Routing,
)

# Legend: N packed tokens, L layers with a router, k selected experts.

_KINDS_OF_ROUTERS = ("Router", "Gate", "Gating")
"""What the names of the classes of routers contain."""
_SELECTIONS = (torch.topk, torch.Tensor.topk)


def routers_of(hf: PreTrainedModel) -> dict[nn.Module, nn.Module]:
    """Returns the routers of a model by the decoder layers that they are in, in the model's order.

    Raises ValueError for a model without experts, or with experts and no router that is known.
    """
    name = type(hf).__name__
    routers = {}
    for layer in decoder_layers(hf):
        found = [module for module in layer.modules() if _is_router(module)]
        has_experts = any(path.split(".")[-1] == "experts" for path, _ in layer.named_modules())
        if len(found) > 1 or (has_experts and not found):
            kinds = sorted({type(module).__name__ for module in found})
            raise ValueError(
                f"{name} has layers ({type(layer).__name__}) with experts and {len(found)} routers "
                f"{kinds}, and router replay knows layers with one; {SWITCH_OFF}"
            )
        if found:
            routers[layer] = found[0]
    if not routers:
        raise ValueError(f"{name} has no experts, so there is no routing to replay; {SWITCH_OFF}")
    return routers


def _is_router(module: nn.Module) -> bool:
    """Returns True for a module that selects `top_k` of `num_experts` experts."""
    name = type(module).__name__
    is_named_so = any(kind in name for kind in _KINDS_OF_ROUTERS)
    numbers = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    return is_named_so and all(isinstance(number, int) for number in numbers)


def shape_of(hf: PreTrainedModel) -> RouterShape:
    """Returns the shape of the model's routers.

    Raises ValueError if `routers_of` does, or if the routers differ.
    """
    routers: list[Any] = list(routers_of(hf).values())
    shapes = {(router.num_experts, router.top_k) for router in routers}
    if len(shapes) > 1:
        raise ValueError(
            f"{type(hf).__name__} has routers that select differently, (experts, of a token): "
            f"{sorted(shapes)}, which router replay does not know; {SWITCH_OFF}"
        )
    [(num_experts, top_k)] = shapes
    return RouterShape(len(routers), num_experts, top_k)


def attach_replay(hf: PreTrainedModel) -> RouterShape:
    """Makes the layers of a model replay and record the routing that a pass is given.

    Without it they compute as before. Raises ValueError if `shape_of` does.
    """
    shape = shape_of(hf)
    routers = routers_of(hf)
    for layer in decoder_layers(hf):
        if layer not in routers:
            layer.register_forward_pre_hook(_without_routing, with_kwargs=True)
    for number, (layer, router) in enumerate(routers.items()):
        _RoutedLayer(number, layer, router, shape)
    return shape


def attach_load(hf: PreTrainedModel) -> RouterShape | None:
    """Does what `attach_replay` does, so that a pass can record the load of the experts.

    Returns None for models without experts, or with routers that replay does not know.
    """
    try:
        require_replay(hf)
    except ValueError:  # it says what is not known, which concerns only those who replay
        return None
    return attach_replay(hf)


def own_aux_loss_coef(config: PretrainedConfig) -> float:
    """Returns the weight that a model's configuration gives the loss that balances its experts.

    It is 0 if the model is not balanced in this way.
    """
    return getattr(config.get_text_config(), "router_aux_loss_coef", None) or 0.0


def require_balance(hf: PreTrainedModel) -> None:
    """Raises ValueError unless the experts of a model can be balanced by `router_aux_loss_coef`."""
    require_replay(hf)
    if not hasattr(hf.config.get_text_config(), "router_aux_loss_coef"):
        raise ValueError(
            f"{type(hf).__name__} has no router_aux_loss_coef in its configuration: its family "
            "balances experts in another way, such as by correction biases; set "
            "router_aux_loss_coef=0"
        )


def freeze_routers(hf: PreTrainedModel) -> None:
    """Makes the parameters of all routers get no gradient.

    Raises ValueError if `routers_of` does.
    """
    for router in routers_of(hf).values():
        router.requires_grad_(False)


def _without_routing(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Removes the routing from the arguments of a layer, which would hand it on."""
    return args, {name: value for name, value in kwargs.items() if name != ROUTING_ARGUMENT}


class _RoutedLayer:
    """A decoder layer with a router, which gets the layer's routing while the layer runs."""

    def __init__(
        self, number: int, layer: nn.Module, router: nn.Module, shape: RouterShape
    ) -> None:
        self.number = number
        self.shape = shape
        self.name = type(router).__name__
        self.routing: Routing | None = None
        self.forward: Any = router.forward
        router.forward = self.route
        layer.register_forward_pre_hook(self.begin, with_kwargs=True)
        # Recomputation in the backward pass ends in the middle of a layer, with an exception.
        layer.register_forward_hook(self.end, always_call=True)

    def begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.routing = kwargs.get(ROUTING_ARGUMENT)
        return _without_routing(layer, args, kwargs)

    def end(self, layer: nn.Module, args: Any, outputs: Any) -> None:
        self.routing = None

    def route(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the router, as its `forward`.

        Raises ValueError if it does not select once.
        """
        routing = self.routing
        if routing is None:
            return self.forward(*args, **kwargs)
        selection = _Selection(self.number, routing, self.shape)
        with selection:
            outputs = self.forward(*args, **kwargs)
        if selection.num_selections != 1:
            raise ValueError(
                f"{self.name} selected {selection.num_selections} times, which router replay does "
                f"not know; {SWITCH_OFF}"
            )
        if routing.load is not None and routing.load.with_probabilities:
            routing.add_probabilities(self.number, selection.logits())
        return outputs


class _Selection(TorchFunctionMode):
    """A context of a router's forward, which records and replaces the selecting `topk`.

    That is the one among the scores of all experts. Routers with groups of experts call others
    before, which choose groups.
    """

    def __init__(self, number: int, routing: Routing, shape: RouterShape) -> None:
        super().__init__()
        self.number = number
        self.routing = routing
        self.shape = shape
        self.num_selections = 0
        self.scored: list[Tensor] = []
        """Outputs with a number for each expert of linear functions."""

    def logits(self) -> Tensor:
        """Returns the logits of the router, (N, E).

        Raises ValueError if it does not make them by one linear function.
        """
        if len(self.scored) != 1:
            raise ValueError(
                f"the router of layer {self.number} makes its logits by {len(self.scored)} linear "
                f"functions, and a router that is balanced by one; set router_aux_loss_coef=0"
            )
        return self.scored[0]

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is F.linear and result.size(-1) == self.shape.num_experts:
            self.scored.append(result)
        if function not in _SELECTIONS:
            return result
        scores = args[0] if args else kwargs["input"]
        own_ids = result.indices
        is_of_all = scores.ndim == 2 and scores.size(1) == self.shape.num_experts
        if not is_of_all or own_ids.size(1) != self.shape.top_k:
            return result
        self.num_selections += 1
        self.routing.own_ids[self.number] = own_ids
        self.routing.used_ids[self.number] = own_ids
        replayed = self.routing.replayed
        if replayed is None:
            return result
        if len(replayed) != len(scores):
            raise ValueError(
                f"the router of layer {self.number} got {len(scores)} tokens, and the routing of "
                f"{len(replayed)} is given: the pass has other tokens"
            )
        recorded_ids = replayed[:, self.number].long()
        ids = torch.where(recorded_ids == OWN, own_ids, recorded_ids)
        self.routing.used_ids[self.number] = ids
        return torch.return_types.topk((scores.gather(1, ids), ids))


_NUM_TRIED = 4
"""The tokens of a trial of a router."""


def require_replay(hf: PreTrainedModel) -> RouterShape:
    """Returns the shape of the routers of a model, which may be on the meta device.

    Raises ValueError if `shape_of` does, or if a trial on copies of the routers shows that one does
    not compute with the experts that are replayed.
    """
    shape = shape_of(hf)
    kinds = {type(router): router for router in routers_of(hf).values()}
    for router in kinds.values():
        _try_router(router, shape, hf.config.get_text_config().hidden_size)
    return shape


def _try_router(router: nn.Module, shape: RouterShape, hidden_size: int) -> None:
    """Raises ValueError unless a router gives each replayed expert a weight that is not 0.

    The weights of some routers are those of masked scores, which are 0 for other experts than the
    router's own.
    """
    generator = torch.Generator().manual_seed(0)
    tried = copy.deepcopy(router).to_empty(device="cpu").float()
    for tensor in [*tried.parameters(), *tried.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.1, generator=generator)
    shifts = torch.arange(_NUM_TRIED)[:, None] * (shape.num_experts // _NUM_TRIED + 1)
    spread = torch.arange(shape.top_k) * (shape.num_experts // shape.top_k)
    ids = (shifts + spread) % shape.num_experts
    hidden = torch.randn(_NUM_TRIED, hidden_size, generator=generator)
    biases = {}
    for argument in inspect.signature(router.forward).parameters:
        if argument.endswith("bias"):  # the correction bias of some routers belongs to their block
            biases[argument] = torch.zeros(shape.num_experts)
    selection = _Selection(0, Routing(ids[:, None]), shape)
    name = type(router).__name__
    try:
        with selection, torch.no_grad():
            outputs = tried(hidden, **biases)
    except Exception as error:  # the code of a model may raise anything
        raise ValueError(
            f"{name} fails with hidden states alone ({type(error).__name__}: {error}), and router "
            f"replay does not know it; {SWITCH_OFF}"
        ) from error
    gives_weights = selection.num_selections == 1 and any(
        _are_weights(output, ids) for output in outputs
    )
    if not gives_weights:
        raise ValueError(
            f"{name} gives experts that it did not select itself no weight, or selects in another "
            f"way than by one topk of all experts, so its routing cannot be replayed; {SWITCH_OFF}"
        )


def _are_weights(output: Any, ids: Tensor) -> bool:
    """Returns True for the weights of the replayed experts, (tokens, k) or (tokens, experts)."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return False
    if output.shape == ids.shape:
        return bool((output != 0).all())
    is_of_all = output.ndim == 2 and len(output) == len(ids)
    if not is_of_all:
        return False
    of_replayed = output.gather(1, ids)
    return bool((of_replayed != 0).all() and (output != 0).sum() == ids.numel())
