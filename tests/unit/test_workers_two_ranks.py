"""Two real gloo processes against one: sharded and replicated, same gradients, log-probabilities
and checkpoints."""

import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import start_method
from ipc_chunks import load_chunk, packed_chunks
from safetensors.torch import load_file, save_file
from tiny_experts import drawn_routing, with_routing, write_experts
from tiny_worker_models import (
    critic_config,
    gradients_of,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    relative_error,
    write_model,
)
from torch.multiprocessing import start_processes

from verl_like.export import export
from verl_like.protocol import DataProto, Metric, merge_metrics, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import reserve_port
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.config.supervised import (
    DPOTrainingConfig,
    ILQLTrainingConfig,
    SupervisedModelConfig,
)
from verl_like.workers.critic import CriticWorker
from verl_like.workers.models.packing import Rows
from verl_like.workers.planning.partition import pack_into_micro_batches, rank_shares
from verl_like.workers.supervised import DPOWorker, ILQLWorker
from verl_like.workers.weights.direct import gather, init_info
from verl_like.workers.weights.exports import WeightExport, in_order
from verl_like.workers.weights.ipc import IpcTransport, receive_chunks
from verl_like.workers.weights.nccl import NcclTransport

LAYOUTS = {"sharded": "zero3", "replicated": "ddp"}
SMALL_STEPS = {"optim": {"lr": 1e-4}}
OBJECTIVE = {"entropy_coeff": 0.01, "use_kl_loss": True, "ptx_coef": 0.4, "ema_decay": 0.5}
BUDGET = 12
REPLAYED = {"micro": 3, "router_replay": {"mode": "R2"}}
BALANCED = {"micro": 1, "router_aux_loss_coef": 0.5}
TWO_EPOCHS = {"ppo_epochs": 2, "optim": {"lr": 1e-4}}


def log_probs_of(data: DataProto, output: DataProto) -> torch.Tensor:
    """What `compute_log_prob` returned of a batch, (B, R)."""
    beside = data.select(batch_keys=["prompts", "responses"]).union(output)
    return padded(beside).batch["old_log_probs"]


def filled_half(data: DataProto, rank: int) -> DataProto:
    """One rank's half of 7 rows: 4 and 3, the latter filled up with a marked copy of row 0."""
    rows = DataProto.concat([data, data.select_idxs([0])]).select_idxs(
        list(range(4 * rank, 4 * rank + 4))
    )
    rows.batch["is_pad"] = torch.tensor([False, False, False, rank == 1])
    return rows


def long_and_short_rows() -> DataProto:
    """8 rows, the longest first."""
    rows = make_batch(rows=8)
    return rows.select_idxs(padded(rows).batch["attention_mask"].sum(-1).argsort(descending=True))


def in_uneven_steps() -> DataProto:
    """7 rows, of which the first four are one optimizer step and the others the next."""
    rows = make_batch(rows=7)
    rows.batch["mini_batch"] = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    return rows


def pairs() -> DataProto:
    """Four pairs of conversations, of 10 to 12 tokens together, whose prompt is two tokens."""
    lengths = torch.tensor([[7, 4], [3, 9], [5, 5], [8, 3]]).flatten().tolist()
    tokens = torch.randint(2, 50, (8, 9), generator=torch.Generator().manual_seed(3)).tolist()
    conversations = [of_row[:length] for of_row, length in zip(tokens, lengths, strict=True)]
    columns = {
        "prompts": [conversation[:1] for conversation in conversations],
        "responses": [conversation[1:] for conversation in conversations],
        "response_mask": [[0] + [1] * (length - 2) for length in lengths],
    }
    tensors = {name: jagged_from_lists(rows, torch.int64) for name, rows in columns.items()}
    return DataProto.from_dict(
        tensors | {"sample_id": torch.arange(8) // 2}, meta_info={"padding": (1, 8, 0)}
    )


def dpo_arguments(path: str, **training: Any) -> tuple[Any, ...]:
    """Of a worker that takes the four pairs in a step."""
    model = SupervisedModelConfig(path=path, fsdp_config={"dtype": "float32"})
    return model, DPOTrainingConfig(beta=0.3, grad_clip=1e6, **SMALL_STEPS, **training), 4, 3, 0


def rows_of_odd_length() -> DataProto:
    """Three rows that two ranks can only share with a filler token."""
    rows = make_batch(rows=3, seed=6)
    assert Rows.of(rows).lengths_B.sum() % 2 == 1
    return rows


def rows_with_drawn_routing() -> DataProto:
    rows = rows_of_odd_length()
    return with_routing(rows, drawn_routing(rows, "mixtral"))


def rows_of_two_prompts() -> DataProto:
    """Six rows of two prompts, which have an odd number of tokens if each prompt counts once."""
    prompts = [[7, 8, 9, 10], [7, 8, 9, 10], [11, 12], [7, 8, 9, 10], [11, 12], [11, 12]]
    rows = make_batch(rows=6, seed=2)
    rows.batch["prompts"] = jagged_from_lists(prompts, torch.int64)
    assert int(Rows.of(rows).lengths_B.sum() - 2 * 4 - 2 * 2) % 2 == 1
    return rows


def scored_rows() -> DataProto:
    """Six scored conversations."""
    rows = make_batch(rows=6).select(batch_keys=["prompts", "responses", "response_mask"])
    rows.batch["score"] = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.0, 4.0])
    return rows


def ilql_arguments(path: str, **training: Any) -> tuple[Any, ...]:
    """Of a worker that takes the six conversations in a step."""
    model = SupervisedModelConfig(path=path, fsdp_config={"dtype": "float32"})
    return (
        model,
        ILQLTrainingConfig(polyak=0.5, awac_beta=0.3, grad_clip=1e6, **SMALL_STEPS, **training),
        6,
        3,
        0,
    )


def receive_by_ipc(
    exports: list[WeightExport], rank: int, buffer: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the engine beside this rank would load from its buffer."""
    from vllm.distributed.utils import StatelessProcessGroup

    place = init_info(exports, rank, num_receivers=2)
    address = place["master_address"], place["master_port"]
    loaded: dict[str, torch.Tensor] = {}
    group = StatelessProcessGroup.create(*address, place["rank_offset"], place["world_size"])
    receive_chunks(
        group,
        lambda message: loaded.update(load_chunk(message, f"GPU-{rank}", buffer)),
        buffer.zero_,
    )
    return loaded


def send_by_ipc(worker: ActorWorker, rank: int) -> dict[str, torch.Tensor]:
    """What an engine beside this rank gets while the rank sends."""
    worker.weight_transport = IpcTransport()
    exports: list[WeightExport] = [None, None]
    dist.all_gather_object(exports, worker.export_weights(version=1))
    buffer = torch.zeros(7000, dtype=torch.uint8)  # the largest parameter has 50 * 32 * 2 bytes
    loaded: list[dict[str, torch.Tensor]] = []
    receiver = threading.Thread(
        target=lambda: loaded.append(receive_by_ipc(exports, rank, buffer)), daemon=True
    )
    receiver.start()
    with worker.weight_transport.joined(rank, num_receivers=2):
        whole = gather(in_order(worker.engine.named_parameters(), torch.bfloat16, [], {}))
        worker.weight_transport.offer(packed_chunks(whole, f"GPU-{rank}", buffer), rank)
        assert not buffer.any()  # closed
    receiver.join(60)
    return loaded[0]


def train_on_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    torch.set_num_threads(1)
    out, model = Path(folder), str(Path(folder, "model"))
    data, ptx = (
        filled_half(make_batch(rows=7), rank),
        make_batch(rows=10, seed=2)[slice(5 * rank, 5 * rank + 5)],
    )
    for layout, strategy in LAYOUTS.items():
        worker = ActorWorker(
            policy_config(model, micro=3, fsdp={"strategy": strategy}, **OBJECTIVE)
        )
        worker.init_model()
        log_probs = log_probs_of(data, worker.compute_log_prob(data))
        gradients, output = gradients_of(
            worker, lambda worker=worker: worker.update_actor(data, ptx)
        )
        export = worker.export_weights(version=1)
        worker.weight_transport = NcclTransport()
        announced = worker.export_weights(version=1)
        assert announced.fingerprints == export.fingerprints and announced.num_bytes == 0
        if rank == 0:  # what it would broadcast
            save_file(
                dict(gather(in_order(worker.engine.named_parameters(), torch.bfloat16, [], {}))),
                out / f"{layout}_gathered",
            )
        else:
            worker.send_weights(num_receivers=1)
        save_file(send_by_ipc(worker, rank), out / f"{layout}_read_{rank}")
        save_file(gradients, out / f"{layout}_gradients_{rank}")
        save_file({"log_probs": log_probs} | parameters_of(worker), out / f"{layout}_state_{rank}")
        values = {
            name: (m.value, m.reduction, m.weight)
            for name, m in output.meta_info["metrics"].items()
        }
        (out / f"{layout}_metrics_{rank}.json").write_text(json.dumps(values))
        (out / f"{layout}_exported_{rank}.json").write_text(
            json.dumps([n for b in export.buckets for n in b.names])
        )
        worker.save_checkpoint(str(out / f"{layout}/checkpoint"))
        worker.save_hf(str(out / f"{layout}/huggingface"))
    ordered = make_batch(rows=8).select_idxs(np.concatenate(rank_shares(8, 4, num_ranks=2)))
    worker = ActorWorker(policy_config(model, prompts=4, micro=1, **SMALL_STEPS))
    worker.init_model()
    gradients, _ = gradients_of(
        worker, lambda: worker.update_actor(ordered.select_idxs(range(4 * rank, 4 * rank + 4)))
    )
    save_file(gradients, out / f"second_gradients_{rank}")
    worker = ActorWorker(policy_config(model, micro=3, **OBJECTIVE))
    worker.init_model()
    halves, one_row = (
        make_batch(rows=7).select_idxs([[0, 1, 2, 3], [4, 5, 6]][rank]),
        make_batch(rows=10, seed=2),
    )
    gradients, output = gradients_of(
        worker, lambda: worker.update_actor(halves, one_row.select_idxs([[0], []][rank]))
    )
    save_file(gradients, out / f"one_ptx_row_{rank}")
    worker = DPOWorker(*dpo_arguments(model, use_dynamic_bsz=False, micro_batch_size_per_gpu=1))
    worker.init_model()
    gradients, _ = gradients_of(
        worker, lambda: worker.update_model(pairs().select_idxs([[], range(8)][rank]))
    )
    save_file(gradients, out / f"uneven_dpo_{rank}")
    if rank:
        metrics = metric_values(worker.evaluate(pairs()).meta_info["metrics"])
        (out / "uneven_dpo_metrics.json").write_text(json.dumps(metrics))
    else:
        worker.evaluate(pairs().select_idxs([]))
    worker = ActorWorker(policy_config(model, micro=2, **TWO_EPOCHS))
    worker.init_model()
    worker.update_actor(in_uneven_steps().select_idxs([[0, 1, 2, 4, 5, 6], [3]][rank]))
    save_file(parameters_of(worker), out / f"two_epochs_{rank}")
    worker = ActorWorker(policy_config(model, budget=BUDGET))
    worker.init_model()
    passes = []
    worker.engine.model.register_forward_pre_hook(lambda *_: passes.append(rank))
    half = long_and_short_rows().select_idxs(range(4 * rank, 4 * rank + 4))
    log_probs = log_probs_of(half, worker.compute_log_prob(half))
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(half))
    save_file(
        {"log_probs": log_probs, "passes": torch.tensor(len(passes))} | gradients,
        out / f"budget_{rank}",
    )
    worker = ActorWorker(policy_config(model, fsdp={"dtype": "bfloat16"}))
    worker.init_model()
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(data))
    save_file(gradients, out / f"bfloat16_gradients_{rank}")
    worker = DPOWorker(
        *dpo_arguments(model, ulysses_sequence_parallel_size=2, max_token_len_per_gpu=12)
    )
    worker.init_model()
    passes = []
    worker.engine.model.register_forward_pre_hook(lambda *_: passes.append(rank))
    gradients, _ = gradients_of(worker, lambda: worker.update_model(pairs()))
    save_file({"passes": torch.tensor(len(passes))} | gradients, out / f"dpo_{rank}")
    metrics = metric_values(worker.evaluate(pairs()).meta_info["metrics"])
    (out / f"dpo_metrics_{rank}.json").write_text(json.dumps(metrics))
    experts = str(out / "experts")
    worker = ActorWorker(policy_config(experts, **REPLAYED, ulysses_sequence_parallel_size=2))
    worker.init_model()
    scored = worker.compute_log_prob(rows_of_odd_length()).batch
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(rows_with_drawn_routing()))
    own = {name: scored[name].values() for name in ("old_log_probs", "routed_experts")}
    save_file(own | gradients, out / f"experts_{rank}")
    settings = {**REPLAYED, "micro": 6, "router_aux_loss_coef": 0.5, "use_prefix_grouper": True}
    worker = ActorWorker(policy_config(experts, **settings, ulysses_sequence_parallel_size=2))
    worker.init_model()
    prompts_once = []
    worker.engine.model.register_forward_pre_hook(
        lambda _, packed: prompts_once.append(packed[0].input_ids.numel())
    )
    rows = rows_of_two_prompts()
    scored = worker.compute_log_prob(rows).batch
    rows = with_routing(rows, scored["routed_experts"])
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(rows))
    own = {name: scored[name].values() for name in ("old_log_probs", "routed_experts")}
    own["num_tokens"] = torch.tensor(prompts_once)
    save_file(own | gradients, out / f"shared_prompts_{rank}")
    rows = rows_of_odd_length()
    for sharing, own_rows in ((1, [[0, 1], [2]][rank]), (2, [0, 1, 2])):
        worker = ActorWorker(
            policy_config(experts, ulysses_sequence_parallel_size=sharing, **BALANCED)
        )
        worker.init_model()
        gradients, output = gradients_of(
            worker, lambda w=worker, at=own_rows: w.update_actor(rows.select_idxs(at))
        )
        save_file(gradients, out / f"balanced_{sharing}_{rank}")
        measured = {
            name: (m.value, m.reduction, m.weight)
            for name, m in output.meta_info["metrics"].items()
        }
        (out / f"balanced_{sharing}_{rank}.json").write_text(json.dumps(measured))
    for sharing, rows in ((2, range(6)), (1, range(3 * rank, 3 * rank + 3))):
        worker = ILQLWorker(*ilql_arguments(model, ulysses_sequence_parallel_size=sharing))
        worker.init_model()
        worker.update_model(scored_rows().select_idxs(list(rows)))
        save_file(parameters_of(worker), out / f"ilql_{sharing}_{rank}")
    critic = CriticWorker(critic_config(model, micro=3), seed=1)
    critic.init_model()
    gradients, _ = gradients_of(critic, lambda: critic.update_critic(data))
    save_file(gradients, out / f"critic_gradients_{rank}")
    # As if each rank were a trainer of its own, and one had more rows than the other.
    os.environ |= JointTrainer(rank, 2, "127.0.0.1", port).worker_env("critic")
    critic = CriticWorker(critic_config(model, micro=3), seed=1)
    critic.init_model()
    own = make_batch(rows=7).select_idxs([[0, 1, 2, 3, 4, 5], [6]][rank])
    gradients, _ = gradients_of(critic, lambda: critic.update_critic(own))
    save_file(gradients, out / f"joint_gradients_{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Folder with what two ranks computed."""
    folder = tmp_path_factory.mktemp("two_ranks")
    write_model(folder / "model")
    write_experts(folder / "experts", "mixtral")
    holder, port = reserve_port()
    with holder:
        start_processes(train_on_rank, (port, str(folder)), nprocs=2, start_method=start_method())
    return folder


@pytest.fixture(scope="module")
def one_rank(two_ranks):
    """Gradients, metrics, log-probabilities and parameters of the same update on one rank."""
    data = make_batch(rows=7)
    group = local_group(ActorWorker, policy_config(str(two_ranks / "model"), **OBJECTIVE))
    log_probs = log_probs_of(data, group.compute_log_prob(data).get())
    ptx = make_batch(rows=10, seed=2)
    gradients, output = gradients_of(group.workers[0], lambda: group.update_actor(data, ptx).get())
    return {
        "gradients": gradients,
        "metrics": metric_values(output.meta_info["metrics"]),
        "log_probs": log_probs,
        "parameters": parameters_of(group.workers[0]),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_gradient_of_one(two_ranks, one_rank, layout):
    for rank in (0, 1):
        gradients = load_file(two_ranks / f"{layout}_gradients_{rank}")
        assert relative_error(gradients, one_rank["gradients"]) < 2e-6


def test_ranks_that_share_sequences_record_and_replay_the_routing_of_their_own_tokens(two_ranks):
    group = local_group(ActorWorker, policy_config(str(two_ranks / "experts"), **REPLAYED))
    scored = group.compute_log_prob(rows_of_odd_length()).get().batch
    expected, _ = gradients_of(
        group.workers[0], lambda: group.update_actor(rows_with_drawn_routing()).get()
    )
    for rank in (0, 1):
        got = load_file(two_ranks / f"experts_{rank}")
        assert torch.equal(got.pop("routed_experts"), scored["routed_experts"].values())
        log_probs = scored["old_log_probs"].values()
        torch.testing.assert_close(got.pop("old_log_probs"), log_probs, rtol=0, atol=1e-5)
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_report_the_metrics_of_one(two_ranks, one_rank, layout):
    parts = [
        json.loads((two_ranks / f"{layout}_metrics_{rank}.json").read_text()) for rank in (0, 1)
    ]
    merged = metric_values(
        merge_metrics([{name: Metric(*part[name]) for name in part} for part in parts])
    )
    for name in [name for name in merged if "perf/" not in name]:
        assert merged[name] == pytest.approx(one_rank["metrics"][name], rel=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_the_log_probs_of_one(two_ranks, one_rank, layout):
    halves = [load_file(two_ranks / f"{layout}_state_{rank}")["log_probs"] for rank in (0, 1)]
    torch.testing.assert_close(torch.cat(halves)[:7], one_rank["log_probs"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ranks_hold_the_same_weights_after_the_update(two_ranks, layout):
    first, second = (load_file(two_ranks / f"{layout}_state_{rank}") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first if name != "log_probs")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_two_ranks_loads_on_one_and_training_goes_on(two_ranks, layout):
    config = policy_config(str(two_ranks / "model"), **OBJECTIVE)
    group = local_group(ActorWorker, config)
    group.load_checkpoint(str(two_ranks / f"{layout}/checkpoint"))
    saved = load_file(two_ranks / f"{layout}_state_0")
    loaded = parameters_of(group.workers[0])
    assert all(torch.equal(loaded[name], saved[name]) for name in loaded)
    engine, start = group.workers[0].engine, load_file(two_ranks / "model/model.safetensors")
    for name, parameter in engine.named_parameters():
        average = engine.optimizer.state[parameter]["ema"].full_tensor()
        torch.testing.assert_close(average, (start[name] + saved[name]) / 2)
    assert engine.training_steps == 1
    moments = engine.optimizer.state[engine.parameters[0]]
    assert moments["step"].item() == 1 and moments["exp_avg"].full_tensor().any()
    group.update_actor(make_batch(rows=7)).get()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_of_two_writes_its_share_of_a_checkpoint_and_nothing_twice(two_ranks, layout):
    first, second = (
        load_file(two_ranks / f"{layout}/checkpoint/rank_0000{rank}.safetensors") for rank in (0, 1)
    )
    shapes = {
        name: p.shape
        for name, p in load_file(two_ranks / f"{layout}_state_0").items()
        if name != "log_probs"
    }
    num_written = sum(tensor.numel() for tensor in [*first.values(), *second.values()])
    # Parameters, two moments and an average; a count of steps for each parameter, and those of
    # steps done and skipped.
    assert num_written == 4 * sum(shape.numel() for shape in shapes.values()) + len(shapes) + 2
    assert all(
        sum(tensor.numel() for tensor in part.values()) > num_written / 4
        for part in (first, second)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_write_one_complete_model_folder(two_ranks, layout):
    exported = load_file(two_ranks / f"{layout}/huggingface/model.safetensors")
    saved = load_file(two_ranks / f"{layout}_state_0")
    assert all(torch.equal(exported[name], saved[name]) for name in exported)
    assert set(exported) == set(saved) - {"log_probs"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_two_ranks_is_exported_as_the_model_folder_that_they_write(
    two_ranks, layout, tmp_path
):
    export(two_ranks / layout, tmp_path / "model")
    written = two_ranks / layout / "huggingface"
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == {
        f.name: f.read_bytes() for f in written.iterdir()
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_lacks_the_file_of_a_rank_is_not_exported(two_ranks, rank, tmp_path):
    shutil.copytree(two_ranks / "sharded/checkpoint", tmp_path / "actor/checkpoint")
    next((tmp_path / "actor/checkpoint").glob(f"rank_0000{rank}.*")).unlink()
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight or a part of it"):
        export(tmp_path / "actor", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_exports_together_hold_every_parameter_once(two_ranks, one_rank, layout):
    names = [
        n
        for rank in (0, 1)
        for n in json.loads((two_ranks / f"{layout}_exported_{rank}.json").read_text())
    ]
    assert sorted(names) == sorted(one_rank["parameters"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_gathers_whole_parameters_for_nccl_while_the_other_rank_sends(two_ranks, layout):
    gathered = load_file(two_ranks / f"{layout}_gathered")
    saved = load_file(two_ranks / f"{layout}/huggingface/model.safetensors")
    assert gathered.keys() == saved.keys()
    assert all(torch.equal(gathered[name], saved[name].bfloat16()) for name in saved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_beside_each_rank_reads_whole_parameters_in_that_ranks_buffer(two_ranks, layout):
    gathered = load_file(two_ranks / f"{layout}_gathered")
    for rank in (0, 1):
        read = load_file(two_ranks / f"{layout}_read_{rank}")
        assert read.keys() == gathered.keys() and all(
            torch.equal(read[name], gathered[name]) for name in read
        )


def test_ranks_that_need_different_numbers_of_micro_batches_run_as_many_and_compute_the_same(
    two_ranks,
):
    rows = long_and_short_rows()
    lengths = padded(rows).batch["attention_mask"].sum(-1).tolist()
    long, short = (
        len(pack_into_micro_batches(half, BUDGET)) for half in (lengths[:4], lengths[4:])
    )
    assert long > short
    config = policy_config(str(two_ranks / "model"))
    group = local_group(ActorWorker, config)
    log_probs = log_probs_of(rows, group.compute_log_prob(rows).get())
    gradients, _ = gradients_of(group.workers[0], lambda: group.update_actor(rows).get())
    halves = [load_file(two_ranks / f"budget_{rank}") for rank in (0, 1)]
    assert [int(half.pop("passes")) for half in halves] == [2 * long, 2 * long]
    torch.testing.assert_close(
        torch.cat([half.pop("log_probs") for half in halves]), log_probs, rtol=0, atol=1e-6
    )
    for half in halves:
        assert relative_error(half, gradients) < 2e-6


def test_two_ranks_that_share_sequences_compute_each_prompt_once_and_the_same_as_one(two_ranks):
    rows = rows_of_two_prompts()
    settings = {**REPLAYED, "micro": 6, "router_aux_loss_coef": 0.5}
    config = policy_config(str(two_ranks / "experts"), **settings)
    group = local_group(ActorWorker, config)
    scored = group.compute_log_prob(rows).get().batch
    rows = with_routing(rows, scored["routed_experts"])
    gradients, _ = gradients_of(group.workers[0], lambda: group.update_actor(rows).get())
    num_computed = int(Rows.of(rows).lengths_B.sum()) - 2 * 4 - 2 * 2
    for rank in (0, 1):
        of_rank = load_file(two_ranks / f"shared_prompts_{rank}")
        share = (num_computed + 1) // 2  # with one filler token
        assert of_rank.pop("num_tokens").tolist() == [share, share]
        assert torch.equal(of_rank.pop("routed_experts"), scored["routed_experts"].values())
        log_probs = scored["old_log_probs"].values()
        torch.testing.assert_close(of_rank.pop("old_log_probs"), log_probs, rtol=0, atol=1e-5)
        assert relative_error(of_rank, gradients) < 1e-5


def test_two_ranks_have_the_critic_gradient_of_one(two_ranks, one_rank):
    data = make_batch(rows=7)
    group = local_group(CriticWorker, critic_config(str(two_ranks / "model")), seed=1)
    gradients, _ = gradients_of(group.workers[0], lambda: group.update_critic(data).get())
    for rank in (0, 1):
        assert relative_error(load_file(two_ranks / f"critic_gradients_{rank}"), gradients) < 2e-6


def test_trainers_of_a_model_that_get_different_numbers_of_rows_have_the_gradient_of_one(two_ranks):
    group = local_group(CriticWorker, critic_config(str(two_ranks / "model")), seed=1)
    gradients, _ = gradients_of(
        group.workers[0], lambda: group.update_critic(make_batch(rows=7)).get()
    )
    for rank in (0, 1):
        assert relative_error(load_file(two_ranks / f"joint_gradients_{rank}"), gradients) < 1e-6


def test_rows_of_a_language_model_loss_may_be_fewer_than_ranks(two_ranks):
    group = local_group(ActorWorker, policy_config(str(two_ranks / "model"), **OBJECTIVE))
    ptx = make_batch(rows=10, seed=2).select_idxs([0])
    gradients, _ = gradients_of(
        group.workers[0], lambda: group.update_actor(make_batch(rows=7), ptx).get()
    )
    for rank in (0, 1):
        assert relative_error(load_file(two_ranks / f"one_ptx_row_{rank}"), gradients) < 2e-6


def test_a_rank_without_pairs_leaves_the_gradient_and_the_metrics_of_the_others(two_ranks):
    arguments = dpo_arguments(
        str(two_ranks / "model"), use_dynamic_bsz=False, micro_batch_size_per_gpu=1
    )
    group = LocalWorkerGroup(ClassWithInitArgs(DPOWorker, *arguments))
    group.init_model()
    gradients, _ = gradients_of(group.workers[0], lambda: group.update_model(pairs()).get())
    expected = metric_values(group.evaluate(pairs()).get().meta_info["metrics"])
    for rank in (0, 1):
        assert relative_error(load_file(two_ranks / f"uneven_dpo_{rank}"), gradients) < 2e-6
    metrics = json.loads((two_ranks / "uneven_dpo_metrics.json").read_text())
    assert metrics == pytest.approx(expected, rel=1e-4)


def test_ranks_of_which_one_has_no_row_of_a_step_train_two_epochs_as_one_rank_does(two_ranks):
    group = local_group(ActorWorker, policy_config(str(two_ranks / "model"), **TWO_EPOCHS))
    start = parameters_of(group.workers[0])
    group.update_actor(in_uneven_steps()).get()
    expected = {
        name: value - start[name] for name, value in parameters_of(group.workers[0]).items()
    }
    for rank in (0, 1):
        trained = load_file(two_ranks / f"two_epochs_{rank}")
        moved = {name: trained[name] - start[name] for name in trained}
        assert relative_error(moved, expected) < 1e-4  # of four steps of Adam in float32


def test_two_ranks_that_share_packed_pairs_have_the_loss_and_gradient_of_one_pair_after_the_other(
    two_ranks,
):
    arguments = dpo_arguments(
        str(two_ranks / "model"), use_dynamic_bsz=False, micro_batch_size_per_gpu=1
    )
    group = LocalWorkerGroup(ClassWithInitArgs(DPOWorker, *arguments))
    group.init_model()
    gradients, _ = gradients_of(group.workers[0], lambda: group.update_model(pairs()).get())
    expected = metric_values(group.evaluate(pairs()).get().meta_info["metrics"])
    # No longer that of the reference
    assert expected["loss"] != pytest.approx(math.log(2), rel=1e-3)
    for rank in (0, 1):
        shared = load_file(two_ranks / f"dpo_{rank}")
        assert shared.pop("passes") == 2  # of two pairs each
        assert relative_error(shared, gradients) < 2e-6
        metrics = json.loads((two_ranks / f"dpo_metrics_{rank}.json").read_text())
        assert metrics == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("sharing", [1, 2])
def test_two_ranks_move_all_heads_of_ilql_as_one_does_whether_they_share_sequences_or_not(
    two_ranks, sharing
):
    group = LocalWorkerGroup(
        ClassWithInitArgs(ILQLWorker, *ilql_arguments(str(two_ranks / "model")))
    )
    group.init_model()
    (worker,), before = group.workers, parameters_of(group.workers[0])
    group.update_model(scored_rows()).get()
    expected = parameters_of(worker)
    assert not torch.equal(expected["heads.target_q1.2.weight"], before["heads.target_q1.2.weight"])
    for rank in (0, 1):
        found = load_file(two_ranks / f"ilql_{sharing}_{rank}")
        changes = (
            {name: state[name] - before[name] for name in expected} for state in (found, expected)
        )
        # Rounding may turn a first step of Adam whose gradient is nearly 0
        assert relative_error(*changes) < 1e-2


def test_ordered_rows_make_the_same_mini_batches_on_two_ranks_as_on_one(two_ranks):
    config = policy_config(str(two_ranks / "model"), prompts=4, **SMALL_STEPS)
    group = local_group(ActorWorker, config)
    gradients, _ = gradients_of(
        group.workers[0], lambda: group.update_actor(make_batch(rows=8)).get()
    )
    # Of the second step: a difference of rounding in the first may move a weight by up to the
    # learning rate.
    assert relative_error(load_file(two_ranks / "second_gradients_0"), gradients) < 1e-3


def test_ranks_add_up_the_gradients_of_bfloat16_layers_in_float32(two_ranks):
    gradients = load_file(two_ranks / "bfloat16_gradients_0")
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    # Sums of two bfloat16 numbers, of which most need more than its 8 digits.
    rounded = {name: gradient.bfloat16().float() for name, gradient in gradients.items()}
    assert relative_error(rounded, gradients) > 1e-4


@pytest.mark.parametrize("sharing", [1, 2])
def test_experts_are_balanced_over_all_ranks_whether_they_share_rows_or_sequences(
    sharing, two_ranks
):
    """With other micro-batches than one rank has, and another number of them on each rank."""
    group = local_group(
        ActorWorker, policy_config(str(two_ranks / "experts"), **BALANCED | {"micro": 3})
    )
    gradients, output = gradients_of(
        group.workers[0], lambda: group.update_actor(rows_of_odd_length()).get()
    )
    expected = metric_values(output.meta_info["metrics"])
    returning = (0,) if sharing == 2 else (0, 1)
    parts = []
    for rank in returning:
        measured = json.loads((two_ranks / f"balanced_{sharing}_{rank}.json").read_text())
        parts.append({name: Metric(*metric) for name, metric in measured.items()})
    metrics = metric_values(merge_metrics(parts))
    for name, value in expected.items():
        if name.startswith(("router_load/", "actor/loss", "actor/router_aux_loss")):
            assert metrics[name] == pytest.approx(value, rel=1e-6), name
    assert metrics["router_load/count/1/0"] > 0
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    for rank in (0, 1):
        got = load_file(two_ranks / f"balanced_{sharing}_{rank}")
        for name, each in gradients.items():
            assert (got[name] - each).abs().max() / norm < 1e-6, name
