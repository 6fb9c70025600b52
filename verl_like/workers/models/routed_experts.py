"""Routing: the experts by which each token is computed in each layer, in a column and in a pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.protocol import Metric
from verl_like.protocol.row_ops import jagged_parts
from verl_like.workers.models.router_load import RouterLoad
from verl_like.workers.models.sequence_exchange import SequenceExchange

# Legend: N packed tokens, B rows, L layers with a router, k selected experts.

ROUTED_EXPERTS = "routed_experts"
UNREPLAYED = "unreplayed_log_probs"
"""The column of log-probabilities without replay."""
OWN = -1
"""The id of experts of a token that has no record. The model's own routing computes it."""
ROUTING_ARGUMENT = "replayed_routing"
"""The argument by which a layer gets the routing of its pass."""
SWITCH_OFF = "set actor_rollout_ref.actor.router_replay.mode=disabled"
"""What a user can do if a model cannot replay, for messages."""


@dataclass(frozen=True)
class RouterShape:
    """How many routers a model has, and what each selects."""

    num_layers: int
    """L, the layers that have a router. They are numbered from 0, in the model's order."""
    num_experts: int
    top_k: int
    """k."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds all ids, and `OWN`."""
        largest = self.num_experts - 1
        return torch.int8 if largest <= torch.iinfo(torch.int8).max else torch.int16

    @property
    def token_bytes(self) -> int:
        """The bytes of the column for one token."""
        return self.num_layers * self.top_k * self.dtype.itemsize


# FSDP2 copies dataclasses among the arguments of a module, so the next two are none.


class RoutingRecord:
    """What the routers select themselves in a pass, before anything is replayed."""

    def __init__(self) -> None:
        self.selected: Tensor | None = None
        """(N, L, k), for all tokens of prompts and responses, of all ranks that share them. A pass
        fills it."""


class Routing:
    """The routing of the N tokens of one pass.

    Layers get it as an argument. So a layer that is computed again in the backward pass
    (gradient checkpointing) replays that of its own micro-batch.
    """

    def __init__(self, replayed: Tensor | None, load: RouterLoad | None = None) -> None:
        """Args:
        replayed: (N, L, k), the ids that are replayed, `OWN` for tokens without a record. None
            replays nothing.
        load: what `fill` fills, or None.
        """
        self.replayed = replayed
        self.load = load
        self.counted: Tensor | None = None
        """How often each token counts in the load, (N,) int64."""
        self.own_ids: dict[int, Tensor] = {}
        """What the router of each layer has selected itself, (N, k) int64, by the layer's
        number."""
        self.used_ids: dict[int, Tensor] = {}
        """The experts that compute the tokens in each layer, (N, k) int64."""
        self.probabilities: dict[int, Tensor] = {}
        """The sums of each layer, (E,), see `RouterLoad.probabilities`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which the model's layers get it."""
        return {ROUTING_ARGUMENT: self}

    def own_selection(self, dtype: torch.dtype) -> Tensor:
        """Returns what the routers have selected themselves, (N, L, k)."""
        in_order = [self.own_ids[number] for number in range(len(self.own_ids))]
        return torch.stack(in_order, dim=1).to(dtype)

    def add_probabilities(self, number: int, logits: Tensor) -> None:
        """Adds what a router says of each expert, (N, E), for `RouterLoad.probabilities`."""
        assert self.counted is not None
        counted = self.counted
        if self.replayed is not None:
            counted = counted * (self.replayed[:, 0, 0] != OWN)
        probabilities = logits.float().softmax(-1)
        weights = counted.float()
        self.probabilities[number] = weights @ probabilities

    def fill(self, load: RouterLoad, shape: RouterShape, exchange: SequenceExchange | None) -> None:
        """Fills the load of the pass, with the tokens of all ranks that share them."""
        assert self.counted is not None
        in_order = [self.used_ids[number] for number in range(shape.num_layers)]
        ids = torch.stack(in_order, dim=1)
        first_of_layer = torch.arange(shape.num_layers, device=ids.device) * shape.num_experts
        places = ids + first_of_layer[:, None]
        times = self.counted[:, None, None].expand_as(ids)
        counts = ids.new_zeros(shape.num_layers * shape.num_experts)
        counts.scatter_add_(0, places.flatten(), times.flatten())
        load.counts = counts.view(shape.num_layers, shape.num_experts)
        if load.with_probabilities:
            of_layers = [self.probabilities[number] for number in range(shape.num_layers)]
            load.probabilities = torch.stack(of_layers)
        if exchange is not None:
            load.counts = exchange.total(load.counts)
            if load.probabilities is not None:
                load.probabilities = exchange.total(load.probabilities)

    def require_all(self, shape: RouterShape | None) -> RouterShape:
        """Returns the shape of the model's routers, or raises ValueError if one has not run with
        this routing. The shape is None if `attach_replay` was not called."""
        num_layers = shape.num_layers if shape else 0
        if not shape or len(self.own_ids) != num_layers:
            raise ValueError(
                f"a pass is given the routing of experts, and the routers of {len(self.own_ids)} "
                f"layers of {num_layers} have run with it, so the model cannot replay; {SWITCH_OFF}"
            )
        return shape


def check_routing(column: Tensor, lengths_B: Tensor, shape: RouterShape) -> None:
    """Raises ValueError, with row and layer, unless a jagged column has the routing of each token.

    A token has k different experts in each layer, or `OWN` alone in all of them.

    Args:
        column: ids of experts, (B, tokens of prompt and response, L, k).
        lengths_B: the number of tokens of each row.
        shape: that of the model.
    """
    ids, offsets = jagged_parts(column)
    expected = (shape.num_layers, shape.top_k)
    if ids.shape[1:] != expected:
        raise ValueError(
            f"routed_experts has entries of (layers, experts of a token) = {tuple(ids.shape[1:])}, "
            f"but the model routes by {expected}: it is the routing of another model"
        )
    wrong_rows = torch.nonzero(offsets.diff() != lengths_B).flatten()
    if len(wrong_rows):
        row = int(wrong_rows[0])
        raise ValueError(
            f"routed_experts has {int(offsets.diff()[row])} tokens in row {row}, whose prompt and "
            f"response have {int(lengths_B[row])}: write one entry for each token"
        )
    is_own = ids == OWN
    is_own_token = is_own.flatten(1).all(1)
    in_order = ids.sort(dim=-1).values
    is_twice = (in_order.diff(dim=-1) == 0).any(-1)
    # Not `>= num_experts`, which the smallest type of ids may not hold: 128 is no int8.
    is_outside = ((ids < 0) | (ids > shape.num_experts - 1)).any(-1)
    is_wrong = (is_outside | is_twice) & ~is_own_token[:, None]
    if not is_wrong.any():
        return
    token, layer = torch.nonzero(is_wrong)[0].tolist()
    row = int(torch.searchsorted(offsets, token, right=True)) - 1
    place = token - int(offsets[row])
    raise ValueError(
        f"routed_experts of token {place} of row {row} in layer {layer} of {shape.num_layers} "
        f"routers is {ids[token, layer].tolist()}: expected {shape.top_k} different experts of 0 "
        f"to {shape.num_experts - 1}, or {OWN} in all layers for a token without a record"
    )


def routing_difference(own: Tensor, recorded: Tensor) -> dict[str, Metric]:
    """Returns what share of the tokens, and of the routings of a token in a layer, differ between
    two columns of the same rows.

    A token differs if its routing in some layer does. Tokens without a record do not count. The
    order of a token's experts does not matter.
    """
    own_ids, _offsets = jagged_parts(own)
    recorded_ids, _offsets = jagged_parts(recorded)
    is_recorded = recorded_ids[:, 0, 0] != OWN
    own_set = own_ids[is_recorded].sort(-1).values
    recorded_set = recorded_ids[is_recorded].sort(-1).values
    routing_differs = (own_set != recorded_set).any(-1)
    token_differs = routing_differs.any(-1)
    num_differing_tokens = int(token_differs.sum())
    num_differing_routings = int(routing_differs.sum())
    of_tokens = Metric.mean_of(num_differing_tokens, token_differs.numel())
    of_routings = Metric.mean_of(num_differing_routings, routing_differs.numel())
    return {"router_replay/tokens_differ": of_tokens, "router_replay/routers_differ": of_routings}


def count_own(column: Tensor) -> int:
    """Returns how many tokens of a column have no record."""
    ids, _offsets = jagged_parts(column)
    return int((ids[:, 0, 0] == OWN).sum())
