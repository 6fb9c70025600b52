"""vLLM's end of router replay on a CPU: records which experts its routers select for each token.

vLLM imports this module in the process of its worker; nothing else imports it. On a GPU vLLM itself
records the routing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from verl_like.workers.models.routed_experts import RouterShape
from verl_like.workers.rollout.token_routing import RoutedPiece, RoutedRequest, without_record
from verl_like.workers.rollout.vllm_routing import routed_layers, routers_of

# Legend: N tokens of a pass, L layers with a router, k selected experts.

_capture_of_pass: "RoutingCapture | None" = None
"""Who records the pass that this process computes, of the engines that record in it."""


def _record_routing(ids: Tensor, number: int) -> None:
    """Records what the router with this number, in the model's order, has selected, (N, k)."""
    if _capture_of_pass is not None:
        _capture_of_pass.listen(ids, number)


def _record_nothing(ids: Tensor, number: int) -> None:
    """Stands for `_record_routing` while vLLM compiles."""


_OPERATORS = torch.library.Library("verl_like", "FRAGMENT")
# Compiled layers call an operator. It changes nothing, but the compiler would leave one out that
# says so and returns nothing.
direct_register_custom_op(
    "record_routing",
    _record_routing,
    mutates_args=["ids"],
    fake_impl=_record_nothing,
    target_lib=_OPERATORS,
)


def _listen(number: int, ids: Tensor) -> None:
    torch.ops.verl_like.record_routing(ids, number)


class RoutingCapture:
    """Records the routing of all requests of the model runner of a `RecordingWorker`, by their
    names."""

    def __init__(self, runner: Any) -> None:
        layers, num_experts, top_k = routed_layers(runner.get_model())
        self.shape = RouterShape(len(layers), num_experts, top_k)
        self.runner = runner
        self.requests: dict[str, RoutedRequest] = {}
        """By vLLM's own names."""
        self.owners: dict[int, tuple[RoutedRequest, int]] = {}
        """The request that computed what is in a block of the cache, and the number of the block
        in the request's sequence, by the number of the block in the cache."""
        self.ids_of_pass: list[Tensor | None] = [None] * len(layers)
        """What the router of each layer selected in this pass, (N and padding, k)."""
        groups = runner.kv_cache_config.kv_cache_groups
        self.group = 0
        """The group of layers whose blocks are looked at: one that keeps all tokens if there is
        one."""
        for number, group in enumerate(groups):
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                self.group = number
                break
        self.block_size = groups[self.group].kv_cache_spec.block_size
        self._execute = runner.execute_model
        runner.execute_model = self.execute

    def listen(self, ids: Tensor, number: int) -> None:
        """Keeps what a router has selected in this pass; see `_record_routing`."""
        self.ids_of_pass[number] = ids.to(self.shape.dtype)

    def execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a pass, as the runner's `execute_model`, and records it."""
        global _capture_of_pass
        self.ids_of_pass = [None] * self.shape.num_layers
        _capture_of_pass = self
        result = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return result

    def _keep(self, scheduled: Any) -> None:
        """Divides the routing of a pass among its requests.

        The tokens of the pass are those of the requests of the runner's batch in their order there,
        and padding follows them.
        """
        num_tokens = scheduled.total_num_scheduled_tokens
        if any(ids is None or len(ids) < num_tokens for ids in self.ids_of_pass):
            sizes = [None if ids is None else len(ids) for ids in self.ids_of_pass]
            raise ValueError(
                f"vLLM computed {num_tokens} tokens, and its routers told of {sizes}: this vLLM "
                "divides tokens in a way that router replay does not know; set "
                "actor_rollout_ref.actor.router_replay.mode=disabled"
            )
        of_layers: Any = [ids[:num_tokens] for ids in self.ids_of_pass if ids is not None]
        ids_of_pass = torch.stack(of_layers, dim=1).cpu().numpy()
        for new in scheduled.scheduled_new_reqs:
            self.requests[new.req_id] = RoutedRequest(len(new.prompt_token_ids))
        before = 0
        states = self.runner.requests
        for name in self.runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens[name]
            ids = ids_of_pass[before : before + count]
            piece = RoutedPiece(states[name].num_computed_tokens, ids)
            self.requests[name].pieces.append(piece)
            before += count
        assert before == num_tokens, "the batch has the requests that are scheduled"
        self._keep_blocks(scheduled)

    def _keep_blocks(self, scheduled: Any) -> None:
        """Keeps who computes the blocks that were given to requests, and finds who computed those
        that come from the prefix cache."""
        begun: list[tuple[str, Sequence[int], int]] = []
        """Name, blocks, and how many tokens come from the cache."""
        for new in scheduled.scheduled_new_reqs:
            begun.append((new.req_id, new.block_ids[self.group], new.num_computed_tokens))
        known = scheduled.scheduled_cached_reqs
        numbers = zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True)
        for name, block_ids, num_computed in numbers:
            if name in known.resumed_req_ids:
                begun.append((name, block_ids[self.group], num_computed))
            elif block_ids is not None:
                self._own(self.requests[name], block_ids[self.group])
        for name, blocks, num_cached in begun:
            request = self.requests[name]
            request.num_blocks = -(-num_cached // self.block_size)
            self._own(request, blocks[request.num_blocks :])
        # After all have their blocks: a request may share those that another one computes in this
        # pass.
        for name, blocks, num_cached in begun:
            if num_cached:
                ids = self._of_cache(blocks, num_cached)
                # Before what this pass computed, which follows in the sequence.
                piece = RoutedPiece(0, ids, is_computed=False)
                self.requests[name].pieces.insert(-1, piece)

    def _own(self, request: RoutedRequest, blocks: Sequence[int]) -> None:
        """Keeps that a request computes its next blocks."""
        for block in blocks:
            self.owners[block] = (request, request.num_blocks)
            request.num_blocks += 1

    def _of_cache(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """Returns the routing of the first tokens of a sequence, which come from the first of its
        blocks."""
        ids = without_record(num_tokens, self.shape)
        starts = range(0, num_tokens, self.block_size)
        for number, start in enumerate(starts):
            end = min(start + self.block_size, num_tokens)
            owner = self.owners.get(blocks[number])
            # A block that is in another place of its owner's sequence has other tokens.
            if owner is not None and owner[1] == number:
                ids[start:end] = owner[0].last_computed(start, end, self.shape)
        return ids

    def take(self, names: Iterable[str], num_tokens: Iterable[int]) -> list[bytes]:
        """Returns the records of requests that have ended, and forgets the requests.

        Args:
            names: the names under which the requests were given to vLLM.
            num_tokens: the number of tokens of each, prompt and response.
        """
        taken = []
        of_name = self._by_given_name()
        for name, length in zip(names, num_tokens, strict=True):
            [own_name] = of_name[name]
            request = self.requests.pop(own_name)
            taken.append(request.record(length, self.shape).tobytes())
            request.compact(self.shape)
        return taken

    def forget(self, names: Iterable[str]) -> None:
        """Forgets requests that were dropped."""
        of_name = self._by_given_name()
        for name in names:
            for own_name in of_name.get(name, []):
                self.requests.pop(own_name).compact(self.shape)

    def _by_given_name(self) -> dict[str, list[str]]:
        """Returns vLLM's names of requests by those that they were given with, to which vLLM
        appends something random."""
        names = defaultdict(list)
        for own_name in self.requests:
            given, _, _ = own_name.rpartition("-")
            names[given].append(own_name)
        return names


class RecordingWorker(CPUWorker):
    """vLLM's worker on a CPU, which also records routing.

    It raises ValueError for a model without routers, or with one that does not tell what it
    selects.
    """

    routing: RoutingCapture

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and makes its routers call the operator, before vLLM compiles it."""
        super().load_model(*args, **kwargs)
        routers = routers_of(self.model_runner.get_model())
        for number, router in enumerate(routers.values()):
            router.set_capture_fn(partial(_listen, number))

    def capture_routing(self) -> tuple[list[int], int, int]:
        """Begins to record, and returns the same as `routed_layers`."""
        self.routing = RoutingCapture(self.model_runner)
        return routed_layers(self.model_runner.get_model())

    def take_routing(self, names: list[str], num_tokens: list[int]) -> list[bytes]:
        """Calls `RoutingCapture.take`."""
        return self.routing.take(names, num_tokens)

    def forget_routing(self, names: list[str]) -> None:
        """Calls `RoutingCapture.forget`."""
        self.routing.forget(names)
