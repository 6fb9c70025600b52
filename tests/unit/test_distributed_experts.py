"""Experts that are distributed over ranks: gradients, exports, checkpoints and memory, with two and
with four processes."""

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import start_method
from safetensors.torch import load_file, save_file
from tiny_experts import NUM_EXPERTS, NUM_ROUTERS, TOP_K, drawn_routing, with_routing, write_experts
from tiny_worker_models import (
    VOCABULARY,
    gradients_of,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    relative_error,
    write_model,
    write_tokenizer,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lengths
from verl_like.single_controller.worker import reserve_port
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.engine import TrainedFsdpConfig
from verl_like.workers.models.distributed_experts import require_distributed_experts
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.packing import Rows
from verl_like.workers.weights.arrival import check_exports
from verl_like.workers.weights.exports import iterate_weights
from verl_like.workers.weights.fingerprints import fingerprint_tensor

FAMILY = "qwen3_moe"
NUM_ROWS = 8
NUM_RANKS = (2, 4)
SCORED = ("old_log_probs", "routed_experts")
LARGE_BYTES = 500_000
LAYOUTS: dict[str, dict[str, Any]] = {
    "gathered": {},
    "distributed": {"expert_parallel_size": 2},
    # Of four ranks two have the same experts.
    "zero1": {
        "expert_parallel_size": 2,
        "fsdp_size": 2,
        "strategy": "zero1",
        "param_offload": True,
        "optimizer_offload": True,
    },
    "bfloat16": {"expert_parallel_size": 2, "dtype": "bfloat16"},
}
IN_FLOAT32 = ("gathered", "distributed", "zero1")


def rows_with_drawn_routing() -> DataProto:
    rows = make_batch(rows=NUM_ROWS)
    return with_routing(rows, drawn_routing(rows, FAMILY))


def rows_of_the_first_experts() -> DataProto:
    """Rows whose tokens are computed by the experts of the first of two ranks alone."""
    rows = make_batch(rows=NUM_ROWS)
    lengths = Rows.of(rows).lengths_B
    ids = torch.tensor([2, 0, 3], dtype=torch.int8)
    of_tokens = ids.expand(int(lengths.sum()), NUM_ROUTERS[FAMILY], TOP_K)
    return with_routing(rows, jagged_from_lengths(of_tokens.contiguous(), lengths))


def share_of(rows: DataProto, rank: int, num_ranks: int) -> DataProto:
    size = NUM_ROWS // num_ranks
    return rows.select_idxs(range(size * rank, size * (rank + 1)))


class LargeTensors(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, of those with at least LARGE_BYTES, and
    keeps the most that are alive at one time. FSDP2 takes and frees memory of the same tensors
    again and again, so their storages are asked for their present size."""

    def __init__(self) -> None:
        super().__init__()
        self.is_counting = True
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        if not self.is_counting:
            return outputs
        for tensor in tree_leaves((args, outputs)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        total = 0
        for reference in self.storages.values():
            storage = reference()
            if storage is not None and storage.nbytes() >= LARGE_BYTES:
                total += storage.nbytes()
        self.most = max(self.most, total)
        return outputs


def join(rank: int, port: int, num_ranks: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "RANK": str(rank),
    }
    torch.set_num_threads(1)


def actor(model: str, micro: int = 3, **fsdp: Any) -> ActorWorker:
    config = policy_config(model, micro=micro, fsdp=fsdp, router_replay={"mode": "R2"})
    worker = ActorWorker(config)
    worker.init_model()
    return worker


def train_on_rank(rank: int, port: int, folder: str, num_ranks: int) -> None:
    join(rank, port, num_ranks)
    out = Path(folder, f"{num_ranks}_ranks")
    out.mkdir(exist_ok=True)
    model = str(Path(folder, "model"))
    rows = share_of(rows_with_drawn_routing(), rank, num_ranks)
    for layout, fsdp in LAYOUTS.items():
        worker = actor(model, **fsdp)
        torch.save(worker.export_weights(version=1), out / f"{layout}_export_{rank}")
        scored = worker.compute_log_prob(share_of(make_batch(rows=NUM_ROWS), rank, num_ranks)).batch
        columns = {name: scored[name].values().clone() for name in SCORED}
        save_file(columns, out / f"{layout}_scored_{rank}")
        gradients, _ = gradients_of(worker, lambda w=worker: w.update_actor(rows))
        save_file(gradients, out / f"{layout}_gradients_{rank}")
        save_file(parameters_of(worker), out / f"{layout}_parameters_{rank}")
        worker.save_checkpoint(str(out / layout / "checkpoint"))
        worker.save_hf(str(out / layout / "huggingface"))
    worker = actor(model, dtype="bfloat16")
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(rows))
    save_file(gradients, out / f"bfloat16_gathered_{rank}")
    worker = actor(model, expert_parallel_size=2)
    worker.load_checkpoint(str(out / "gathered/checkpoint"))
    save_file(parameters_of(worker), out / f"loaded_{rank}")
    of_first = share_of(rows_of_the_first_experts(), rank, num_ranks)
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(of_first))
    save_file(gradients, out / f"first_experts_{rank}")
    dist.destroy_process_group()


def count_on_rank(rank: int, port: int, folder: str) -> None:
    """Counts the bytes of weights and gradients of experts, which are larger than all else here."""
    join(rank, port, 2)
    rows = share_of(rows_with_drawn_routing(), rank, 2)
    layouts = {
        "gathered": LAYOUTS["gathered"],
        "distributed": LAYOUTS["distributed"],
        "distributed, bfloat16": LAYOUTS["distributed"] | {"dtype": "bfloat16"},
    }
    most = {}
    for layout, fsdp in layouts.items():
        worker = actor(str(Path(folder, "large")), micro=8, **fsdp)
        counted = LargeTensors()
        optimizer_step = worker.engine.step

        def step(counted: Any = counted, optimizer_step: Any = optimizer_step) -> float:
            counted.is_counting = False
            return optimizer_step()

        worker.engine.step = step
        with counted:
            worker.update_actor(rows)
        most[layout] = counted.most
    Path(folder, f"bytes_{rank}.json").write_text(json.dumps(most))
    dist.destroy_process_group()


def write_large_experts(path: Path) -> None:
    """A mixture whose experts are larger than all else that is computed with few tokens."""
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        num_hidden_layers=NUM_ROUTERS[FAMILY],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=512,
        pad_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    write_tokenizer(path)


def start(function: Any, num_ranks: int, *arguments: Any) -> None:
    holder, port = reserve_port()
    with holder:
        start_processes(function, (port, *arguments), nprocs=num_ranks, start_method=start_method())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with what two ranks computed, and what four did."""
    folder = tmp_path_factory.mktemp("distributed")
    write_experts(folder / "model", FAMILY)
    for num_ranks in NUM_RANKS:
        start(train_on_rank, num_ranks, str(folder), num_ranks)
    return folder


@pytest.fixture(scope="module")
def one_rank(folder):
    """The same on one rank."""
    model = str(folder / "model")
    group = local_group(ActorWorker, policy_config(model, router_replay={"mode": "R2"}))
    worker = group.workers[0]
    scored = group.compute_log_prob(make_batch(rows=NUM_ROWS)).get().batch
    gradients, _ = gradients_of(worker, lambda: group.update_actor(rows_with_drawn_routing()).get())
    return {"scored": scored, "gradients": gradients}


@pytest.mark.parametrize("layout", IN_FLOAT32)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_experts_get_the_gradient_of_one_rank_with_the_routing_that_is_replayed(
    folder, one_rank, num_ranks, layout
):
    expected = one_rank["gradients"]
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    for rank in range(num_ranks):
        got = load_file(folder / f"{num_ranks}_ranks/{layout}_gradients_{rank}")
        assert set(got) == set(expected)
        for name, gradient in expected.items():
            assert (got[name] - gradient).norm() / norm < 1e-6, name
        assert relative_error(got, expected) < 2e-5


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_distributed_experts_in_bfloat16_get_the_gradient_of_gathered_ones(folder, num_ranks):
    """Each rank adds its tokens' parts of a sum in bfloat16, which has 8 bits, in its own order."""
    for rank in range(num_ranks):
        gathered = load_file(folder / f"{num_ranks}_ranks/bfloat16_gathered_{rank}")
        distributed = load_file(folder / f"{num_ranks}_ranks/bfloat16_gradients_{rank}")
        assert relative_error(distributed, gathered) < 1e-2


@pytest.mark.parametrize("layout", IN_FLOAT32)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks_with_different_experts_compute_and_route_as_one_rank(
    folder, one_rank, num_ranks, layout
):
    parts = [
        load_file(folder / f"{num_ranks}_ranks/{layout}_scored_{rank}") for rank in range(num_ranks)
    ]
    for name in SCORED:
        got = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(got, one_rank["scored"][name].values(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_experts_without_a_token_get_no_gradient_and_the_others_that_of_one_rank(folder, num_ranks):
    group = local_group(
        ActorWorker, policy_config(str(folder / "model"), router_replay={"mode": "R2"})
    )
    group.load_checkpoint(str(folder / f"{num_ranks}_ranks/gathered/checkpoint"))
    expected, _ = gradients_of(
        group.workers[0], lambda: group.update_actor(rows_of_the_first_experts()).get()
    )
    for rank in range(num_ranks):
        got = load_file(folder / f"{num_ranks}_ranks/first_experts_{rank}")
        assert relative_error(got, expected) < 2e-5
        for name, gradient in got.items():
            if "experts" in name:
                assert gradient[[0, 2, 3]].any(), name
                assert not gradient[[1, *range(4, NUM_EXPERTS)]].any(), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_exports_of_distributed_experts_are_the_tensors_of_the_files(folder, num_ranks, layout):
    exports = [
        torch.load(folder / f"{num_ranks}_ranks/{layout}_export_{rank}", weights_only=False)
        for rank in range(num_ranks)
    ]
    files = load_file(folder / "model/model.safetensors")
    expected = {}
    for name, tensor in files.items():
        expected[name] = fingerprint_tensor(tensor.to(torch.bfloat16))
    assert check_exports(exports, version=1) == expected
    sent = dict(iterate_weights(exports))
    assert all(torch.equal(sent[name], files[name].to(torch.bfloat16)) for name in files)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_checkpoint_of_distributed_experts_loads_on_one_rank_and_training_goes_on(
    folder, num_ranks, layout
):
    out = folder / f"{num_ranks}_ranks"
    group = local_group(
        ActorWorker, policy_config(str(folder / "model"), router_replay={"mode": "R2"})
    )
    group.load_checkpoint(str(out / layout / "checkpoint"))
    saved = load_file(out / f"{layout}_parameters_0")
    loaded = parameters_of(group.workers[0])
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    engine = group.workers[0].engine
    for parameter in engine.parameters:
        assert engine.optimizer.state[parameter]["exp_avg"].full_tensor().any()
    group.update_actor(rows_with_drawn_routing()).get()
    last = num_ranks - 1
    assert_same(load_file(out / f"{layout}_parameters_{last}"), saved)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_checkpoint_of_gathered_experts_loads_into_distributed_ones(folder, num_ranks):
    out = folder / f"{num_ranks}_ranks"
    saved = load_file(out / "gathered_parameters_0")
    for rank in range(num_ranks):
        assert_same(load_file(out / f"loaded_{rank}"), saved)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_the_model_folder_has_the_files_that_gathered_experts_have(folder, num_ranks):
    out = folder / f"{num_ranks}_ranks"
    gathered = load_file(out / "gathered/huggingface/model.safetensors")
    distributed = load_file(out / "distributed/huggingface/model.safetensors")
    assert {name: tensor.shape for name, tensor in distributed.items()} == {
        name: tensor.shape for name, tensor in gathered.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(out / "distributed/huggingface")
    saved = load_file(out / "distributed_parameters_0")
    assert_same(dict(loaded.named_parameters()), saved)


def test_two_ranks_hold_half_of_the_bytes_of_experts_that_zero3_does_and_copy_none(folder):
    """With float32, in which they are stored, a rank computes with the half of the experts that it
    stores, and has their gradients: of all 3 layers, half of each."""
    write_large_experts(folder / "large")
    start(count_on_rank, 2, str(folder))
    bytes_of_layer = NUM_EXPERTS * 3 * 128 * 512 * 4
    shards_and_gradients = 2 * 3 * bytes_of_layer / 2
    for rank in (0, 1):
        most = json.loads((folder / f"bytes_{rank}.json").read_text())
        assert most["distributed"] == shards_and_gradients
        assert most["distributed"] <= 0.55 * most["gathered"]
        # Half of a layer's weights and gradients in bfloat16, and these gradients in float32.
        copied = bytes_of_layer
        assert most["distributed, bfloat16"] == shards_and_gradients + copied


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_model_without_experts_is_refused(tmp_path):
    model = policy_config(write_model(tmp_path)).model
    fsdp = TrainedFsdpConfig(expert_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM of .* has no experts that transformers"
    ):
        require_distributed_experts(model, fsdp, PolicyModel, 2, key="m", fsdp_key="f")


def test_experts_that_cannot_be_divided_among_the_ranks_are_refused(tmp_path):
    model = policy_config(write_experts(tmp_path, FAMILY)).model
    fsdp = TrainedFsdpConfig(expert_parallel_size=3)
    with pytest.raises(ValueError, match=r"6 ranks share the parameters .* the 8 experts of a"):
        require_distributed_experts(model, fsdp, PolicyModel, 6, key="m", fsdp_key="f")
    of_two_copies = TrainedFsdpConfig(expert_parallel_size=2, fsdp_size=4)
    require_distributed_experts(model, of_two_copies, PolicyModel, 12, key="m", fsdp_key="f")


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_whole_copies_of_all_experts_are_not_distributed(strategy):
    with pytest.raises(ValueError, match=f"strategy={strategy}, which has all experts on every"):
        TrainedFsdpConfig(expert_parallel_size=2, strategy=strategy)
