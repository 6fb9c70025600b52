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


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("leaf", ["w13_weight", "w13_bias", "w2_weight", "w2_bias"])
def test_pieces_of_stacked_experts_of_two_ranks_add_up(leaf: str, is_transposed: bool) -> None:
    """Transposed ones are those of gpt-oss, where the gate alternates with what it multiplies; the
    others, as those of Granite, have one after the other. Each rank has half of the values between
    the matrices."""
    from verl_like.workers.weights.vllm_pieces import Source, cut_parameter

    torch.manual_seed(1)
    num_ranks = 2
    is_back = leaf.startswith("w2")
    num_rows = HIDDEN if is_back else 2 * SIZE
    num_columns = SIZE if is_back else HIDDEN
    of_all = torch.randn(NUM_EXPERTS, num_rows, num_columns)
    if leaf.endswith("bias"):
        of_all = of_all[:, :, 0]
    halves = [(0, SIZE), (SIZE, 2 * SIZE)] if not is_transposed else [(0, 2 * SIZE)]
    totals = 0
    for rank in range(num_ranks):
        module = module_of(0)
        module.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert)
        parallel = module.moe_config.moe_parallel_config
        parallel.tp_rank = rank
        parallel.tp_size = num_ranks
        if leaf == "w2_bias":
            own = of_all
        elif is_back:
            own = of_all.chunk(num_ranks, dim=2)[rank]
        else:
            own = torch.cat(
                [of_all[:, first:end].chunk(num_ranks, dim=1)[rank] for first, end in halves], dim=1
            )
        in_file = of_all
        if is_transposed and not leaf.endswith("bias"):
            in_file = of_all.transpose(1, 2)
        source = Source("experts", in_file.shape, is_transposed=is_transposed)
        pieces = cut_parameter(module, leaf, own, [source])
        assert pieces is not None
        for piece in pieces:
            totals += fingerprint_sum(piece.values, piece.first_row, piece.first_column)
        # Rank 0 alone answers for a bias that both have.
        of_less = [] if leaf == "w2_bias" and rank == 1 else None
        assert cut_parameter(module, leaf, own[:, :-1], [source]) == of_less
    assert read_fingerprints({"experts": totals}) == {"experts": fingerprint_tensor(in_file)}


def test_a_layer_whose_weights_are_transposed_in_files_is_cut_like_another() -> None:
    from verl_like.workers.weights.vllm_pieces import Source, cut_parameter

    parameter = torch.randn(4, 3)
    source = Source("c_attn", torch.Size([3, 4]), is_transposed=True)
    with pytest.MonkeyPatch.context() as patch:
        where = "verl_like.workers.weights.vllm_pieces"
        patch.setattr(f"{where}.get_tensor_model_parallel_rank", lambda: 0)
        [piece] = cut_parameter(nn.Linear(3, 4), "weight", parameter, [source]) or []
        assert piece.hf_name == "c_attn" and torch.equal(piece.values, parameter.T)
        wide = Source("c_attn", torch.Size([5, 4]), is_transposed=True)
        assert cut_parameter(nn.Linear(3, 4), "weight", parameter, [wide]) is None


def test_gpt_oss_gets_single_experts_and_its_sinks_when_all_else_is_loaded() -> None:
    from verl_like.workers.weights.vllm_gpt_oss import GptOssUpdates

    loads: list[dict[str, list]] = []

    def load(weights: Any) -> set[str]:
        found = {name: tensor.tolist() for name, tensor in weights}
        loads.append(found)
        return set(found)

    model = SimpleNamespace(load_weights=load)
    updates = GptOssUpdates(model)
    sinks = torch.tensor([7.0])
    names = model.load_weights(
        [
            ("layers.0.self_attn.sinks", sinks),
            ("layers.0.mlp.experts.down_proj", torch.tensor([[1.0], [2.0]])),
            ("norm.weight", torch.tensor([3.0])),
        ]
    )
    singles = {"layers.0.mlp.experts.0.down_proj": [1.0], "layers.0.mlp.experts.1.down_proj": [2.0]}
    assert loads == [{**singles, "norm.weight": [3.0]}] and names == set(loads[0])
    sinks.fill_(8.0)  # what came is written over meanwhile
    updates.finish()
    assert loads[1:] == [{"layers.0.self_attn.sinks": [7.0]}]
    updates.finish()
    assert loads[2:] == [{}]


def test_the_layers_with_a_router_are_told_with_its_numbers() -> None:
    """In another order than the model has them, and with a layer that has none."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    from verl_like.workers.rollout.vllm_routing import RoutingExtension

    class Router(BaseRouter):
        def __init__(self) -> None:
            self.global_num_experts = 300
            self.top_k = 6

    Router.__abstractmethods__ = frozenset()
    layers = [nn.Module() for _number in range(3)]
    for number, layer in zip((4, 1), layers, strict=False):
        layer.layer_id = number
        layer.router = Router()
    extension = RoutingExtension.__new__(RoutingExtension)
    extension.model_runner = SimpleNamespace(get_model=lambda: nn.ModuleList(layers))
    assert extension.routed_layers() == ([1, 4], 300, 6)
