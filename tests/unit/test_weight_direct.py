"""What a CPU shows of weight_transport=nccl and ipc: what is announced, who joins where, who waits
for whom."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ipc_chunks import load_chunk, packed_chunks
from test_config_rules import REQUIRED, SMALL
from tiny_worker_models import local_group, policy_config, write_model

from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.experience_maker import ExperienceMaker, Weights
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer
from verl_like.workers.actor import ActorWorker
from verl_like.workers.engine.mesh import init_process_group
from verl_like.workers.weights.arrival import check_exports
from verl_like.workers.weights.direct import DirectTransport, gather, init_info
from verl_like.workers.weights.exports import WeightExport, collect_weights, in_order
from verl_like.workers.weights.ipc import IpcTransport, receive_chunks
from verl_like.workers.weights.nccl import NcclTransport

KEY = "actor_rollout_ref.rollout.weight_transport"
OWN_POOL = ["+resource_pool_spec.rollout_pool=[2]", "role_mapping.rollout=rollout_pool"]


PARAMETERS = [
    ("0.weight", torch.randn(7, 5)),
    ("0.bias", torch.randn(7)),
    ("1.weight", torch.randn(3, 7)),
]


def announce(transport: DirectTransport, rank: int = 0, world_size: int = 1) -> WeightExport:
    settings = {
        "dtype": torch.bfloat16,
        "rank": rank,
        "world_size": world_size,
        "version": 3,
        "bucket_bytes": 72,
    }
    return transport.publish(collect_weights(PARAMETERS, allocate=transport.allocate, **settings))


@pytest.mark.parametrize("transport_class", [NcclTransport, IpcTransport])
def test_the_ranks_announce_every_parameter_once_without_values_and_where_rank_0_waits(
    monkeypatch: pytest.MonkeyPatch, transport_class: type[DirectTransport]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    transport = transport_class()
    exports = [announce(transport, 0, 2), announce(transport_class(), 1, 2)]
    staged = collect_weights(PARAMETERS, dtype=torch.bfloat16, rank=0, world_size=1, version=3)
    assert check_exports(exports, 3) == check_exports([staged], 3)
    assert [export.num_bytes for export in exports] == [0, 0]
    buckets = [bucket for export in exports for bucket in export.buckets]  # 70 bytes; 14 and 42
    assert [(bucket.index, bucket.names) for bucket in buckets] == [
        (0, ("0.weight",)),
        (1, ("0.bias", "1.weight")),
    ]
    assert [bucket.shapes for bucket in buckets] == [((7, 5),), ((7,), (3, 7))]
    assert exports[1].address is None and exports[0].address[0] == "127.0.0.1"
    assert announce(transport, 0, 2).address == exports[0].address  # of each version


def test_each_group_of_receivers_joins_once_at_an_address_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joins: list[tuple[str, int, int]] = []

    class Noting(NcclTransport):
        def _join(self, host: str, port: int, world_size: int) -> str:
            joins.append((host, port, world_size))
            return f"group {len(joins)}"

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    transport, groups = Noting(), []
    for receivers, num_receivers in (("maker_0.1", 2), ("maker_1.1", 4), ("maker_0.1", 2)):
        with transport.joined(0, num_receivers, receivers):
            groups.append(transport._group)
    first, second = transport.address(0, "maker_0.1"), transport.address(0, "maker_1.1")
    assert first != second and first[0] == "127.0.0.2"
    assert joins == [(*first, 3), (*second, 5)] and groups == ["group 1", "group 2", "group 1"]
    assert transport.address(1, "maker_0.1") is None
    with transport.joined(1, 2, "maker_0.1"):
        assert len(joins) == 2  # other ranks only gather


def test_trainer_and_replicas_meet_in_vllms_own_store_under_ranks_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLWeightTransferInitInfo,
    )

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    transport = NcclTransport()
    export = announce(transport)
    infos = [
        NCCLWeightTransferInitInfo(**init_info([export], first_rank, num_receivers=4))
        for first_rank in (0, 2)
    ]
    trainer = NCCLTrainerInitInfo(*export.address, infos[0].world_size, rank=0)
    # Two replicas of two processes
    assert [info.rank_offset for info in infos] == [1, 3] and trainer.world_size == 5
    wire = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
    assert all(getattr(info, name) == getattr(trainer, name) for info in infos for name in wire)
    said: dict[int, str] = {}
    groups = []  # kept, for the first has the store

    def join(rank: int, info: NCCLWeightTransferInitInfo) -> None:
        group = StatelessProcessGroup.create(
            info.master_address, info.master_port, rank, info.world_size
        )
        groups.append(group)
        said[rank] = group.broadcast_obj("the trainer's id" if rank == 0 else None, src=0)

    places = [(0, trainer), *((info.rank_offset + i, info) for info in infos for i in range(2))]
    threads = [threading.Thread(target=join, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == dict.fromkeys(range(5), "the trainer's id")


def test_an_ipc_buffer_is_written_again_when_all_have_read_it_and_freed_before_the_engines_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One trainer and two receivers of a GPU meet in vLLM's own store, for two updates."""
    from vllm.distributed.utils import StatelessProcessGroup

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    init_process_group("cpu", rank=0, world_size=1)
    transport, buffer = IpcTransport(), torch.zeros(80, dtype=torch.uint8)
    export, events = announce(transport), []
    loaded: list[dict[str, torch.Tensor]] = [{}, {}]

    def receive(index: int) -> None:
        place = init_info([export], index, num_receivers=2)
        rank, size = place["rank_offset"], place["world_size"]
        group = StatelessProcessGroup.create(
            place["master_address"], place["master_port"], rank, size
        )

        def load(message: dict) -> None:
            time.sleep(0.1 * (1 + index))  # a trainer that did not wait would be ahead
            loaded[index] |= load_chunk(message, "GPU-0", buffer)
            events.append("read")

        for _ in range(2):
            time.sleep(0.1 * (1 + index))
            events.append("awake")
            receive_chunks(group, load, lambda: events.append("closed"))
            events.append("goes on")

    threads = [threading.Thread(target=receive, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for factor in (1.0, 3.0):
        parameters = [(name, factor * value) for name, value in PARAMETERS]
        with transport.joined(rank=0, num_receivers=2):
            events.append("takes memory")
            transport.offer(
                packed_chunks(
                    gather(in_order(parameters, torch.bfloat16, [], {})),
                    "GPU-0",
                    buffer,
                    events.append,
                ),
                rank=0,
            )
            events.append("frees")
            time.sleep(0.1)  # receivers that did not wait would go on
    for thread in threads:
        thread.join(60)
    # 70 bytes of bfloat16; 14 and 42.
    update = [
        "awake",
        "awake",
        "takes memory",
        "written",
        "read",
        "read",
        "written",
        "read",
        "read",
    ]
    update += ["closed", "closed", "frees", "goes on", "goes on"]
    halves = [events[: len(update)], events[len(update) :]]
    assert halves[0][:-2] == update[:-2] and sorted(halves[0][-2:] + halves[1]) == sorted(
        update[-2:] + update
    )
    for tensors in loaded:
        assert tensors.keys() == dict(PARAMETERS).keys()
        assert all(torch.equal(tensors[name], (3 * value).bfloat16()) for name, value in PARAMETERS)


class Actor(Worker):
    """Notes that it is asked to send."""

    calls: list[str] = []  # noqa: RUF012

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, num_receivers: int) -> None:
        self.calls.append(f"send to {num_receivers}")


class Rollout(Worker):
    """Notes what it loads."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported: str, version: int) -> None:
        Actor.calls.append(f"load {exported} {version}")


def test_an_actor_sends_as_its_rank_to_as_many_receivers_as_it_is_told(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    class Recording(DirectTransport):
        @contextmanager
        def joined(self, rank: int, num_receivers: int, receivers: str = "") -> Iterator[None]:
            calls.append(("joined", rank, num_receivers, receivers))
            yield

        def send(self, weights: Any, rank: int) -> None:
            calls.append(("sent", {weight.dtype for weight in weights}, rank))

        def _join(self, host: str, port: int, world_size: int) -> Any:
            raise NotImplementedError

    actor = local_group(ActorWorker, policy_config(write_model(tmp_path / "policy"))).workers[0]
    actor.weight_transport, actor.export_dtype = Recording(), "float16"
    actor.send_weights(3, "maker_1")
    assert calls == [("joined", 0, 3, "maker_1"), ("sent", {torch.float16}, 0)]


def test_an_actor_of_another_driver_sends_where_the_weights_say_so() -> None:
    loads: list[dict[str, Any]] = []
    sent: list[int] = []

    class Group:
        world_size = 3

        def load_weights(self, exported: str, **options: Any) -> None:
            assert sent == [3], "nobody sends yet"
            loads.append(options)

    def send(num_receivers: int) -> Any:
        sent.append(num_receivers)
        return SimpleNamespace(get=lambda: sent.append(0))

    nothing = dict.fromkeys(
        ("rule_scorer", "reward_columns", "kl_controller", "model_cost", "timer")
    )
    config = load_ppo_config([*REQUIRED, *SMALL, *OWN_POOL, f"{KEY}=nccl"])
    maker = ExperienceMaker(config=config, groups={"rollout": Group()}, **nothing)
    maker.load_weights(Weights("exported", 7, send, ("10.0.0.7", 4321)))
    assert loads == [{"version": 7, "address": ("10.0.0.7", 4321)}]
    assert sent == [3, 0]  # the sender was waited for


@pytest.mark.parametrize(
    ("transport", "pools", "first"),
    [("nccl", OWN_POOL, ["send to 1"]), ("ipc", [], ["send to 1"]), ("gloo", OWN_POOL, [])],
)
def test_the_driver_has_the_actor_send_before_it_waits_for_the_rollout_to_load(
    transport: str, pools: list[str], first: list[str]
) -> None:
    config = load_ppo_config([*REQUIRED, *SMALL, *pools, f"{KEY}={transport}"])
    groups = {
        role: LocalWorkerGroup(ClassWithInitArgs(worker), role=role)
        for role, worker in (("actor", Actor), ("rollout", Rollout))
    }
    nothing = dict.fromkeys(
        ("rule_scorer", "reward_columns", "kl_controller", "model_cost", "timer")
    )
    maker = ExperienceMaker(config=config, groups=groups, **nothing)
    Actor.calls.clear()
    maker.load_weights(Weights("what was exported", 7))
    assert Actor.calls == [*first, "load what was exported 7"]


def test_the_synchronous_trainer_alone_lets_its_engines_load_before_they_check() -> None:
    loads: list[dict[str, Any]] = []

    class Group:
        world_size = 1

        def load_weights(self, exported: str, **options: Any) -> None:
            loads.append(options)

        def report_finished_calls(self) -> None: ...

    nothing = dict.fromkeys(
        ("rule_scorer", "reward_columns", "kl_controller", "model_cost", "timer")
    )
    config = load_ppo_config([*REQUIRED, *SMALL])
    maker = ExperienceMaker(config=config, groups={"rollout": Group()}, **nothing)
    maker.load_weights(Weights("exported", 7))
    trainer: Any = object.__new__(RayPPOTrainer)
    trainer.maker, trainer.learner = maker, SimpleNamespace(actor=Group())
    trainer.load_weights(Weights("exported", 8))
    assert loads == [{"version": 7}, {"version": 8, "checks_first": False}]


@pytest.mark.parametrize(
    ("transport", "pools", "other", "message"),
    [
        (
            "nccl",
            OWN_POOL,
            [],
            "takes no two processes of one GPU, but actor and rollout share the pool global_pool",
        ),
        (
            "ipc",
            [],
            OWN_POOL,
            "but actor is on the pool global_pool and rollout on rollout_pool; set role_mapp",
        ),
    ],
)
def test_a_direct_transport_is_refused_where_it_cannot_be(
    transport: str, pools: list[str], other: list[str], message: str
) -> None:
    load_ppo_config([*REQUIRED, *SMALL, f"{KEY}={transport}", *pools])
    for overrides, expected in (
        (
            ["device=cpu", *pools],
            "is of GPUs, but trainer.device=cpu; set shared_memory or object_store",
        ),
        (["actor_rollout_ref.rollout.name=hf", *pools], "rollout.name=hf; set name=vllm, or gloo"),
        (
            ["actor_rollout_ref.rollout.name=vllm_async", *pools],
            "rollout.name=vllm_async; set name=vllm, or gloo",
        ),
        (other, message),
    ):
        with pytest.raises(ValueError) as refused:
            load_ppo_config([*REQUIRED, *SMALL, f"{KEY}={transport}", *overrides])
        (line,) = str(refused.value).splitlines()
        assert line.startswith(f"{KEY}={transport}") and expected in line
