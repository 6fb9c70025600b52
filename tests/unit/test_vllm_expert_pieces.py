"""The fingerprints of experts that vLLM distributes over processes, on modules that are made by
hand, because vLLM's build for CPUs does not compute with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from verl_like.workers.weights.fingerprints import (
    fingerprint_sum,
    fingerprint_tensor,
    read_fingerprints,
)

pytestmark = pytest.mark.vllm

NUM_EXPERTS = 6
NUM_RANKS = 3
HIDDEN = 5
SIZE = 4
SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def matrices() -> dict[str, torch.Tensor]:
    """Those of each expert by their names in files."""
    torch.manual_seed(0)
    found = {}
    for expert in range(NUM_EXPERTS):
        for part in SHARDS:
            shape = (HIDDEN, SIZE) if part == "down_proj" else (SIZE, HIDDEN)
            found[f"experts.{expert}.{part}.weight"] = torch.randn(shape)
    return found


def module_of(rank: int) -> Any:
    """vLLM's module of a process that has every third expert, in another order than in files."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    module = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(module)
    own = list(reversed(range(rank, NUM_EXPERTS, NUM_RANKS)))
    places = {expert: place for place, expert in enumerate(own)}
    module.own = own
    module.expert_map_manager = SimpleNamespace(
        map_global_to_local=lambda expert: places.get(expert, -1)
    )
    module.moe_config = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(tp_rank=0, tp_size=1, ep_rank=rank, ep_size=NUM_RANKS)
    )
    return module


def loaded(module: Any, of_files: dict[str, torch.Tensor], leaf: str) -> torch.Tensor:
    """What such a process loads into `w13_weight` or `w2_weight`."""
    parts = ("down_proj",) if leaf == "w2_weight" else ("gate_proj", "up_proj")
    of_experts = []
    for expert in module.own:
        of_parts = [of_files[f"experts.{expert}.{part}.weight"] for part in parts]
        of_experts.append(torch.cat(of_parts))
    return torch.stack(of_experts)


def found_by_all(of_files: dict[str, torch.Tensor]) -> dict[str, int]:
    """The sums of the fingerprints that all processes find in what they loaded."""
    from verl_like.workers.weights.vllm_pieces import Source, cut_parameter

    totals: dict[str, Any] = {}
    for rank in range(NUM_RANKS):
        module = module_of(rank)
        for leaf in ("w13_weight", "w2_weight"):
            sources = []
            for name, matrix in of_files.items():
                _, expert, part, _ = name.split(".")
                if (part == "down_proj") == (leaf == "w2_weight"):
                    shard = SHARDS[part]
                    sources.append(Source(name, matrix.shape, expert=int(expert), shard=shard))
            pieces = cut_parameter(module, leaf, loaded(module, of_files, leaf), sources)
            assert pieces is not None
            for piece in pieces:
                own = fingerprint_sum(piece.values, piece.first_row, piece.first_column)
                totals[piece.hf_name] = totals.get(piece.hf_name, 0) + own
    return read_fingerprints(totals)


def test_the_pieces_of_all_processes_add_up_to_each_expert() -> None:
    of_files = matrices()
    expected = {name: fingerprint_tensor(matrix) for name, matrix in of_files.items()}
    assert found_by_all(of_files) == expected


def test_two_experts_of_different_processes_that_are_exchanged_are_missed_by_name() -> None:
    of_files = matrices()
    expected = {name: fingerprint_tensor(matrix) for name, matrix in of_files.items()}
    first = "experts.1.up_proj.weight"
    second = "experts.5.up_proj.weight"
    exchanged = of_files | {first: of_files[second], second: of_files[first]}
    found = found_by_all(exchanged)
    assert {name for name in expected if found[name] != expected[name]} == {first, second}


def test_an_expert_that_no_process_was_sent_leaves_the_layout_unknown() -> None:
    from verl_like.workers.weights.vllm_pieces import Source, cut_parameter

    of_files = matrices()
    module = module_of(1)
    sources = []
    for name, matrix in of_files.items():
        _, expert, part, _ = name.split(".")
        if part == "down_proj" and expert != "4":
            sources.append(Source(name, matrix.shape, expert=int(expert), shard="w2"))
    assert (
        cut_parameter(module, "w2_weight", loaded(module, of_files, "w2_weight"), sources) is None
    )
