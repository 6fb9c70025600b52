"""Several trainers of one model, each with worker groups of its own, against one group of all their
ranks."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_worker_models import critic_config, make_batch, policy_config, write_model

from verl_like.protocol import DataProto, merge_metrics, metric_values
from verl_like.single_controller import WorkerError
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.critic import CriticWorker
from verl_like.workers.engine import mesh
from verl_like.workers.weights.arrival import check_exports
from verl_like.workers.weights.exports import iterate_weights

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ROWS = 8
OBJECTIVE = {"entropy_coeff": 0.01, "use_kl_loss": True, "grad_clip": 0.5}
Groups = dict[str, RayWorkerGroup]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joint_trainers(count: int, store: dist.TCPStore) -> list[JointTrainer]:
    return [JointTrainer(index, count, "127.0.0.1", store.port) for index in range(count)]


@contextlib.contextmanager
def start(
    model: str,
    num_ranks: int,
    processes: Sequence[Sequence[str]],
    of: str,
    trainer: JointTrainer | None,
    sharding: dict[str, Any],
) -> Iterator[Groups]:
    """The worker groups of one driver: a set of processes for each entry of `processes`. `of` makes
    names unique."""
    num_trainers = trainer.count if trainer else 1
    rows = {"prompts": ROWS // 2 // num_trainers, "micro": 1}
    policy = policy_config(model, fsdp=sharding, **rows, **OBJECTIVE, ppo_epochs=2)
    critic = critic_config(model, **rows, ppo_epochs=2)
    critic = critic.model_copy(
        update={"model": critic.model.model_copy(update={"fsdp_config": policy.actor.fsdp_config})}
    )
    classes = {
        "actor": RayClassWithInitArgs(ActorWorker, config=policy),
        "critic": RayClassWithInitArgs(CriticWorker, config=critic, seed=3),
    }
    groups: Groups = {}
    pools = [RayResourcePool([num_ranks], use_gpu=False) for _ in processes]
    for pool, roles in zip(pools, processes, strict=True):
        name = "+".join(roles)
        group = RayWorkerGroup(
            pool,
            create_colocated_worker_cls({role: classes[role] for role in roles}),
            # More threads may add in another order.
            worker_env={"OMP_NUM_THREADS": "1"}
            | (trainer.worker_env(f"{name} of {of}") if trainer else {}),
            deadline_s=120.0,
        )
        groups |= group.spawn(roles)
    yield groups
    for group in groups.values():
        group.shutdown()
    for pool in pools:
        pool.release()


def together(trainers: Sequence[Groups], role: str, method: str, *arguments: Any) -> list[Any]:
    """What a method returned to each trainer; an entry of a list in `arguments` is one
    trainer's."""
    futures = [
        getattr(groups[role], method).remote(
            *(a[i] if isinstance(a, list) else a for a in arguments)
        )
        for i, groups in enumerate(trainers)
    ]
    return [future.get() for future in futures]


def shares(data: DataProto, num_trainers: int, num_ranks: int) -> list[DataProto]:
    """Each trainer's rows of two mini-batches, so that rank r of all has in both the rows that it
    has in one group."""
    order = (
        torch.arange(ROWS)
        .view(2, num_trainers * num_ranks, -1)
        .transpose(0, 1)
        .reshape(num_trainers, -1)
    )
    return [data.select_idxs(rows.tolist()) for rows in order]


@dataclass
class Trained:
    metrics: list[dict[str, float]]
    """Of each update, merged over the trainers."""
    exports: list[Any]
    """Of each trainer after the last update."""
    actor: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]


def train(trainers: Sequence[Groups], num_ranks: int, folder: Path) -> Trained:
    """Two updates of actor and critic, the second one twice: from the first one's checkpoint."""
    for role in ("actor", "critic"):
        together(trainers, role, "init_model")
    metrics: list[dict[str, float]] = []
    for step, update in enumerate((0, 1, 1)):
        for role in ("actor", "critic"):
            if step == 2:
                together(trainers, role, "load_checkpoint", str(folder / f"{role}_0"))
            batches = shares(make_batch(rows=ROWS, seed=update), len(trainers), num_ranks)
            outputs = together(trainers, role, f"update_{role}", batches)
            metrics.append(
                metric_values(merge_metrics([output.meta_info["metrics"] for output in outputs]))
            )
            together(trainers, role, "save_checkpoint", str(folder / f"{role}_{update}"))
    for role in ("actor", "critic"):
        together(trainers, role, "save_hf", str(folder / role))
    # One after the other: no trainer needs another one for it.
    exports = [groups["actor"].export_weights.remote(version=2).get() for groups in trainers]
    saved = {role: load_file(folder / role / "model.safetensors") for role in ("actor", "critic")}
    return Trained(metrics, exports, saved["actor"], saved["critic"])


def train_alone(model: str, num_ranks: int, sharding: dict[str, Any], folder: Path) -> Trained:
    with start(model, num_ranks, [["actor", "critic"]], "one", None, sharding) as groups:
        return train([groups], num_ranks, folder)


def train_jointly(
    model: str,
    store: dist.TCPStore,
    num_ranks: int,
    processes: Sequence[Sequence[str]],
    sharding: dict[str, Any],
    folder: Path,
) -> Trained:
    with contextlib.ExitStack() as stack:
        trainers = [
            stack.enter_context(start(model, num_ranks, processes, str(folder), trainer, sharding))
            for trainer in joint_trainers(2, store)
        ]
        return train(trainers, num_ranks, folder)


def assert_same_training(joint: Trained, alone: Trained) -> None:
    for role in ("actor", "critic"):
        got, expected = getattr(joint, role), getattr(alone, role)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected), role
    for metrics, of_one in zip(joint.metrics, alone.metrics, strict=True):
        assert metrics.keys() == of_one.keys()
        for name in [name for name in of_one if "perf/" not in name]:
            assert metrics[name] == pytest.approx(of_one[name], rel=1e-12, abs=1e-12), name
    fingerprints = check_exports(alone.exports[0], version=2)
    expected = dict(iterate_weights(alone.exports[0]))
    assert len(joint.exports) == 2
    for exports in joint.exports:
        assert check_exports(exports, version=2) == fingerprints
        assert all(torch.equal(value, expected[name]) for name, value in iterate_weights(exports))


def test_two_trainers_learn_the_same_as_one_group_of_two_ranks(
    model: str, store: dist.TCPStore, tmp_path: Path
):
    joint = train_jointly(
        model, store, 1, [["actor", "critic"]], {"strategy": "single"}, tmp_path / "joint"
    )
    alone = train_alone(model, 2, {"strategy": "ddp"}, tmp_path / "alone")
    assert_same_training(joint, alone)
    # What an update from a checkpoint does is what it did before, of the actor and of the critic.
    for before, again in zip(joint.metrics[2:4], joint.metrics[4:], strict=True):
        assert [again[n] for n in again if "perf/" not in n] == [
            before[n] for n in before if "perf/" not in n
        ]


@pytest.mark.proof
def test_trainers_with_several_pools_learn_the_same_as_one_group(
    model: str, store: dist.TCPStore, tmp_path: Path
):
    joint = train_jointly(model, store, 1, [["actor"], ["critic"]], {}, tmp_path / "joint")
    assert_same_training(joint, train_alone(model, 2, {"strategy": "ddp"}, tmp_path / "alone"))


@pytest.fixture(scope="module")
def one_rank(model: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_alone(model, 1, {"strategy": "single"}, tmp_path_factory.mktemp("one_rank"))


@pytest.mark.proof
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_trainers_of_two_ranks_learn_the_same_under_every_strategy_with_offload(
    model: str, store: dist.TCPStore, tmp_path: Path, one_rank: Trained, strategy: str
):
    sharding = {"strategy": strategy, "param_offload": True, "optimizer_offload": True}
    joint = train_jointly(model, store, 2, [["actor", "critic"]], sharding, tmp_path / "joint")
    # One group of four ranks has two copies, as two trainers have.
    copies = {} if strategy == "ddp" else {"fsdp_size": 2}
    assert_same_training(joint, train_alone(model, 4, sharding | copies, tmp_path / "alone"))
    for role in ("actor", "critic"):
        got, expected = getattr(joint, role), getattr(one_rank, role)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-5)
    for metrics, of_one in zip(joint.metrics, one_rank.metrics, strict=True):
        for name in [name for name in of_one if "perf/" not in name]:
            assert metrics[name] == pytest.approx(of_one[name], rel=1e-5, abs=1e-5), name


def test_what_trainers_do_not_have_in_common_is_refused(model: str, store: dist.TCPStore):
    with contextlib.ExitStack() as stack:
        trainers = [
            stack.enter_context(start(model, 1, [["critic"]], "uneven", trainer, {}))
            for trainer in joint_trainers(2, store)
        ]
        together(trainers, "critic", "init_model")
        # Which is no error: they may train other numbers of rows
        longer = [make_batch(rows=4), make_batch(rows=8)]
        futures = [
            groups["critic"].update_critic(data)
            for groups, data in zip(trainers, longer, strict=True)
        ]
        norms = [future.get().meta_info["metrics"]["critic/grad_norm"].value for future in futures]
        assert norms[0] == norms[1] > 0
        futures = [
            groups["critic"].execute_func_rank_zero.remote(mesh.build_meshes, "cpu", 2, 1)
            for groups in trainers
        ]
        for future in futures:
            with pytest.raises(
                WorkerError,
                match=r"fsdp_config\.fsdp_size=2 does not divide the 1 ranks of the pool",
            ):
                future.get()


def shorten_deadline(worker: CriticWorker) -> DataProto:
    mesh.JOIN_DEADLINE = timedelta(seconds=2)
    return DataProto()


@pytest.mark.proof
def test_a_trainer_that_never_comes_is_named(model: str, store: dist.TCPStore):
    with start(model, 1, [["critic"]], "missing", joint_trainers(3, store)[1], {}) as groups:
        groups["critic"].execute_with_func_generator(shorten_deadline)
        with pytest.raises(
            WorkerError, match=r"trainer\(s\) \[0, 2\] of 3 did not bring 1 rank\(s\) of critic"
        ):
            groups["critic"].init_model()


def test_a_store_that_nobody_opened_is_named(monkeypatch: pytest.MonkeyPatch):
    for name, value in JointTrainer(1, 2, "127.0.0.1", 1).worker_env("actor").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh, "JOIN_DEADLINE", timedelta(seconds=1))
    # A test before may have left a group of its own
    monkeypatch.setattr(mesh.dist, "is_initialized", lambda: False)
    with pytest.raises(
        TimeoutError, match=r"trainer\(s\) 0 \(no store\) of 2 did not .* 1\) within 0:00:01"
    ):
        mesh.init_process_group("cpu", rank=0, world_size=1)
