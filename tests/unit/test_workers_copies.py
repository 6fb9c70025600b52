"""Forward-only copies of the actor and the critic compute what the trained models compute, or
refuse to."""

import dataclasses
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from tiny_worker_models import (
    VOCABULARY,
    critic_config,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    write_model,
    write_tokenizer,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import deep_equal
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.worker import Worker, reserve_port
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.copies import ActorCopyWorker, CriticCopyWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.weights.arrival import WeightSyncError
from verl_like.workers.weights.exports import WeightExport

ROLES = {"actor": (ActorWorker, ActorCopyWorker), "critic": (CriticWorker, CriticCopyWorker)}
COMPUTE = {"actor": "compute_log_prob", "critic": "compute_values"}
COLUMNS = {"actor": ["old_log_probs", "entropys", "sum_pi_squared"], "critic": ["values"]}
NORM = "model.norm.weight"
LAYER = "model.layers.1.self_attn."


def settings(role: str, path: str) -> dict[str, Any]:
    """Arguments that the trained worker and its copy have in common: 8 rows are micro-batches of 3,
    3 and 2."""
    if role == "critic":
        return {
            "config": critic_config(path, micro=3, forward_micro_batch_size_per_gpu=3),
            "seed": 5,
        }
    config = policy_config(path, micro=3)
    rollout = config.rollout.model_copy(update={"dtype": "float32"})
    return {"config": config.model_copy(update={"rollout": rollout}), "with_sum_pi_squared": True}


def compute(group: Any, role: str, data: DataProto | None = None) -> DataProto:
    return getattr(group, COMPUTE[role])(data or make_batch()).get()


def changed(before: DataProto, after: DataProto, role: str) -> list[bool]:
    return [not deep_equal(before.batch[name], after.batch[name]) for name in COLUMNS[role]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("copies") / "model")


@pytest.fixture(scope="module")
def trained(model_path) -> dict[str, tuple[Any, DataProto, list[WeightExport]]]:
    """By role: a group that was trained for one step, what it computes, and its weights as version
    4."""
    found = {}
    for role, (worker_class, _) in ROLES.items():
        group = local_group(worker_class, **settings(role, model_path))
        getattr(group, f"update_{role}")(make_batch()).get()
        found[role] = (group, compute(group, role), group.export_weights(version=4).get())
    return found


@pytest.fixture(params=ROLES)
def role(request) -> str:
    return request.param


@pytest.fixture
def copy(role, model_path) -> Any:
    return local_group(ROLES[role][1], **settings(role, model_path))


def exchanged(right: WeightExport, first: str, second: str) -> WeightExport:
    """The export `right` with the names of two parameters exchanged, but not their fingerprints."""
    other = {first: second, second: first}
    (bucket,) = right.buckets
    renamed = tuple(other.get(name, name) for name in bucket.names)
    return dataclasses.replace(right, buckets=(dataclasses.replace(bucket, names=renamed),))


def corrupted(right: WeightExport, name: str) -> WeightExport:
    """The export `right` with one bit of the last element of a parameter turned over."""
    (bucket,) = right.buckets
    end = 4 * sum(
        torch.Size(shape).numel() for shape in bucket.shapes[: bucket.names.index(name) + 1]
    )
    data = bucket.data.copy()
    data[end - 4] ^= 1
    return dataclasses.replace(right, buckets=(dataclasses.replace(bucket, data=data),))


def test_a_copy_starts_as_the_trained_model_does_and_may_be_sent_version_0(role, copy, model_path):
    start = local_group(ROLES[role][0], **settings(role, model_path))
    expected = compute(start, role)
    assert not any(changed(expected, compute(copy, role), role))
    copy.load_weights(start.export_weights(version=0), version=0)
    assert not any(changed(expected, compute(copy, role), role))


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_copy_takes_weights_by_every_transport(role, model_path, transport):
    arguments = settings(role, model_path)
    if role == "critic":
        arguments["weight_transport"] = transport
    else:
        config = arguments["config"]
        rollout = config.rollout.model_copy(update={"weight_transport": transport})
        arguments["config"] = config.model_copy(update={"rollout": rollout})
    group, copy = (local_group(worker_class, **arguments) for worker_class in ROLES[role])
    getattr(group, f"update_{role}")(make_batch()).get()
    (export,) = group.export_weights(version=1).get()
    assert type(export.buckets[0].data).__name__ == "SharedPages"
    copy.load_weights([export], version=1)
    assert not any(changed(compute(group, role), compute(copy, role), role))


def test_a_copy_computes_bit_for_bit_what_the_trained_model_computes(role, copy, trained):
    _, expected, exports = trained[role]
    before = compute(copy, role)
    copy.load_weights(exports, version=4)
    got = compute(copy, role)
    assert all(changed(before, got, role)) and not any(changed(expected, got, role))
    assert set(got.batch.keys()) == set(expected.batch.keys())
    got_metrics, expected_metrics = got.meta_info["metrics"], expected.meta_info["metrics"]
    assert got_metrics.keys() == expected_metrics.keys()
    for name in [name for name in expected_metrics if not name.startswith("perf/")]:
        assert got_metrics[name] == expected_metrics[name]


def test_the_critic_travels_in_the_dtype_of_its_layers_and_the_actor_in_the_rollouts(model_path):
    wide = critic_config(model_path)
    narrow = CriticWorker(
        wide.model_copy(
            update={"model": wide.model.model_copy(update={"fsdp_config": bfloat16()})}
        ),
        1,
    )
    actor = ActorWorker(policy_config(model_path))
    for worker in (narrow, actor):
        worker.init_model()
    assert narrow.export_weights(version=1).dtype == "bfloat16"
    assert actor.export_weights(version=1).dtype == actor.config.rollout.dtype == "bfloat16"
    assert actor.engine.dtype == "float32"


def bfloat16() -> Any:
    return critic_config("").model.fsdp_config.model_copy(update={"dtype": "bfloat16"})


def test_layers_in_bfloat16_compute_the_same_from_weights_that_are_stored_in_it(model_path):
    config = policy_config(model_path, fsdp={"dtype": "bfloat16", "param_offload": True})
    actor, copy = (
        local_group(worker_class, config, with_sum_pi_squared=True)
        for worker_class in ROLES["actor"]
    )
    actor.update_actor(make_batch()).get()
    copy.load_weights(actor.export_weights(version=1), version=1)
    assert {p.dtype for p in parameters_of(copy.workers[0]).values()} == {torch.bfloat16}
    assert not any(changed(*(compute(group, "actor") for group in (actor, copy)), "actor"))


@pytest.mark.parametrize(
    ("damage", "names"),
    [(corrupted, [NORM]), (exchanged, [f"{LAYER}k_proj.weight", f"{LAYER}v_proj.weight"])],
)
def test_parameters_that_are_corrupt_or_traded_places_are_named_and_change_nothing(
    role, copy, trained, damage, names
):
    before, (export,) = compute(copy, role), trained[role][2]
    message = (
        f"version 4 changed on their way: {len(names)} of .* tensors differ from .*: "
        f"{', '.join(names)}"
    )
    with pytest.raises(WorkerError, match=rf"{message}\."):
        copy.load_weights([damage(export, *names)], version=4)
    assert not any(changed(before, compute(copy, role), role))


def lose_a_write(worker: Any) -> None:
    """From now on what is written into `model.norm.weight` at the next load does not reach the
    engine."""
    found = dict(worker.engine.named_parameters())
    lost = iter([(found | {NORM: found[NORM].clone()}).items()])
    worker.engine.named_parameters = lambda: next(lost, found.items())


def test_a_parameter_that_was_not_written_is_named_and_the_copy_refuses_until_a_load_succeeds(
    role, copy, trained
):
    _, expected, exports = trained[role]
    lose_a_write(copy.workers[0])
    with pytest.raises(
        WorkerError,
        match=rf"version 4 did not arrive at the copy: 1 of .* differ from .*: {NORM}\.",
    ):
        copy.load_weights(exports, version=4)
    with pytest.raises(WorkerError, match="no verified weights; call load_weights"):
        compute(copy, role)
    copy.load_weights(exports, version=4)
    assert not any(changed(expected, compute(copy, role), role))


def without(right: WeightExport, name: str) -> WeightExport:
    """The export of a model that lacks a parameter, which is the last of its bucket."""
    (bucket,) = right.buckets
    assert bucket.names[-1] == name
    size = 4 * torch.Size(bucket.shapes[-1]).numel()
    shorter = dataclasses.replace(
        bucket,
        names=bucket.names[:-1],
        shapes=bucket.shapes[:-1],
        data=bucket.data[: len(bucket.data) - size],
    )
    return dataclasses.replace(right, buckets=(shorter,), num_tensors=right.num_tensors - 1)


def test_exports_of_another_model_name_what_differs_and_change_nothing(role, copy, trained):
    before, (export,) = compute(copy, role), trained[role][2]
    name = export.buckets[0].names[-1]
    with pytest.raises(
        WorkerError, match=rf"version 4 are not of the model .*: 1 of .* differ from .*: {name}\."
    ):
        copy.load_weights([without(export, name)], version=4)
    assert not any(changed(before, compute(copy, role), role))


def test_an_incomplete_set_of_exports_changes_nothing(role, copy, trained):
    _, expected, (export,) = trained[role]
    copy.load_weights([export], version=4)
    with pytest.raises(WorkerError, match="buckets: expected"):
        copy.load_weights([dataclasses.replace(export, buckets=())], version=4)
    assert not any(changed(expected, compute(copy, role), role))


def test_a_load_after_a_pass_that_failed_leaves_right_weights_or_a_copy_that_refuses(
    role, copy, trained
):
    def stop(*_: Any) -> None:
        raise MemoryError("in the middle of the pass")

    hook = copy.workers[0].engine.units[1].register_forward_pre_hook(stop)
    with pytest.raises(WorkerError, match="in the middle of the pass"):
        compute(copy, role)
    hook.remove()
    with pytest.raises(WorkerError, match="a pass that failed"):
        copy.load_weights(trained[role][2], version=4)
    with pytest.raises(WorkerError, match="no verified weights"):
        compute(copy, role)


def test_copies_have_no_updates_no_optimizer_and_no_gradients(role, copy):
    methods = set(registered_methods(ROLES[role][1])) - set(registered_methods(Worker))
    # The reference is the model without its adapter; the comparison at the start is with the
    # actor's copy.
    of_actor = {"compute_ref_log_prob", "score_greedy"} if role == "actor" else set()
    assert methods == {"load_weights", COMPUTE[role]} | of_actor
    assert not hasattr(copy, f"update_{role}") and not hasattr(copy.workers[0], f"update_{role}")
    engine = copy.workers[0].engine
    assert engine.optimizer is None and isinstance(engine.fsdp, ForwardFsdpConfig)
    assert not any(parameter.requires_grad for _, parameter in engine.named_parameters())


def half(rank: int, seed: int = 0) -> DataProto:
    return make_batch(seed=seed).select_idxs(list(range(4 * rank, 4 * rank + 4)))


def copies_on_rank(rank: int, port: int, sent: dict[str, Any]) -> dict[str, Any]:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for role, (worker_class, copy_class) in ROLES.items():
        arguments = settings(role, sent["model_path"])
        copy = copy_class(**arguments)
        copy.init_model()
        (export,) = sent[role]
        copy.load_weights([export], 4)
        found[f"{role} of one rank"] = getattr(copy, COMPUTE[role])(half(rank))
        worker = worker_class(**arguments)
        worker.init_model()
        getattr(worker, f"update_{role}")(half(rank, seed=1))
        exports: list[Any] = [None, None]
        dist.all_gather_object(exports, worker.export_weights(version=5))
        if rank == 1:
            lose_a_write(copy)
        try:
            copy.load_weights(exports, 5)
        except WeightSyncError as error:
            found[f"{role} lost"] = str(error)
        found[f"{role} fingerprint"] = copy.load_weights(exports, 5)
        found[f"{role} trained"] = getattr(worker, COMPUTE[role])(half(rank))
        found[f"{role} copy"] = getattr(copy, COMPUTE[role])(half(rank))
        found[f"{role} exports"] = exports
    arguments = settings("actor", sent["experts_path"])
    trained = ActorWorker(**arguments)
    copied = ActorCopyWorker(**arguments)
    for worker in (trained, copied):
        worker.init_model()
    trained.update_actor(half(rank, seed=1))
    exports = [None, None]
    dist.all_gather_object(exports, trained.export_weights(version=6))
    found["experts before"] = copied.compute_log_prob(half(rank))
    copied.load_weights(exports, 6)
    found["experts copy"] = copied.compute_log_prob(half(rank))
    found["experts trained"] = trained.compute_log_prob(half(rank))
    found["experts exports"] = exports
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory) -> str:
    """A model with a layer without experts and one with 3, which two ranks share unevenly."""
    path = tmp_path_factory.mktemp("experts") / "model"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return str(path)


@pytest.fixture(scope="module")
def two_ranks(model_path, experts_path, trained) -> list[dict[str, Any]]:
    """What each of two ranks found; rows 0 to 3 are those of the first."""
    sent = {"model_path": model_path, "experts_path": experts_path}
    sent |= {role: exports for role, (_, _, exports) in trained.items()}
    holder, port = reserve_port()
    with holder, ProcessPoolExecutor(2, mp_context=forked_ranks.ranks()) as pool:
        return list(pool.map(copies_on_rank, range(2), [port] * 2, [sent] * 2, timeout=240))


def test_a_copy_on_two_ranks_computes_what_one_rank_trained(role, two_ranks, trained):
    _, expected, _ = trained[role]
    got = DataProto.concat([found[f"{role} of one rank"] for found in two_ranks])
    for name in COLUMNS[role]:
        torch.testing.assert_close(
            got.batch[name].values(), expected.batch[name].values(), rtol=1e-6, atol=1e-6
        )


def test_a_copy_on_two_ranks_computes_what_two_ranks_trained(role, two_ranks):
    for found in two_ranks:
        assert not any(changed(found[f"{role} trained"], found[f"{role} copy"], role))
        assert all(changed(found[f"{role} of one rank"], found[f"{role} copy"], role))
    assert two_ranks[0][f"{role} fingerprint"] == two_ranks[1][f"{role} fingerprint"]


def test_a_copy_on_two_ranks_has_the_experts_of_the_trained_model(two_ranks, experts_path):
    for found in two_ranks:
        assert not any(changed(found["experts trained"], found["experts copy"], "actor"))
        assert all(changed(found["experts before"], found["experts copy"], "actor"))
    names = two_ranks[0]["experts exports"][0].fingerprints
    assert {f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(3)} <= {
        *names
    }
    copy = local_group(ActorCopyWorker, **settings("actor", experts_path))
    copy.load_weights(two_ranks[0]["experts exports"], version=6)
    trained = DataProto.concat([found["experts trained"] for found in two_ranks])
    for name, got in compute(copy, "actor").batch.items():
        torch.testing.assert_close(got.values(), trained.batch[name].values(), rtol=1e-6, atol=1e-6)


def test_a_copy_on_one_rank_computes_what_two_ranks_trained(role, copy, two_ranks):
    copy.load_weights(two_ranks[0][f"{role} exports"], version=5)
    trained = DataProto.concat([found[f"{role} trained"] for found in two_ranks])
    for name, got in compute(copy, role).batch.items():
        torch.testing.assert_close(got.values(), trained.batch[name].values(), rtol=1e-6, atol=1e-6)


def test_both_ranks_notice_a_parameter_that_one_did_not_write(role, two_ranks):
    for found in two_ranks:
        assert found[f"{role} lost"].endswith(f": {NORM}.")
