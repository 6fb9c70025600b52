"""What a CPU shows of weight_transport=nccl: what is announced, who joins where, who is called when."""

import threading

import pytest
import torch
from test_config_rules import REQUIRED, SMALL

from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.experience_maker import ExperienceMaker, Weights
from verl_like.workers.weight_sync import WeightExport, check_exports, collect_weights
from verl_like.workers.weight_transfer.nccl import NcclTransport, init_info

NCCL = ["actor_rollout_ref.rollout.weight_transport=nccl"]
OWN_POOL = ["+resource_pool_spec.rollout_pool=[2]", "role_mapping.rollout=rollout_pool"]


PARAMETERS = [("0.weight", torch.randn(7, 5)), ("0.bias", torch.randn(7)), ("1.weight", torch.randn(3, 7))]


def announce(transport: NcclTransport, rank: int = 0, world_size: int = 1) -> WeightExport:
    settings = {"dtype": torch.bfloat16, "rank": rank, "world_size": world_size, "version": 3, "bucket_bytes": 72}
    return transport.publish(collect_weights(PARAMETERS, allocate=transport.allocate, **settings))


def test_the_ranks_announce_every_parameter_once_without_values_and_where_rank_0_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    transport = NcclTransport()
    exports = [announce(transport, 0, 2), announce(NcclTransport(), 1, 2)]
    staged = collect_weights(PARAMETERS, dtype=torch.bfloat16, rank=0, world_size=1, version=3)
    assert check_exports(exports, 3) == check_exports([staged], 3)
    assert [export.num_bytes for export in exports] == [0, 0]
    buckets = [bucket for export in exports for bucket in export.buckets]  # 70 bytes; 14 and 42
    assert [(bucket.index, bucket.names) for bucket in buckets] == [(0, ("0.weight",)), (1, ("0.bias", "1.weight"))]
    assert [bucket.shapes for bucket in buckets] == [((7, 5),), ((7,), (3, 7))]
    assert exports[1].address is None and exports[0].address[0] == "127.0.0.1"
    assert announce(transport, 0, 2).address == exports[0].address  # of each version


def test_trainer_and_replicas_meet_in_vllms_own_store_under_ranks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferInitInfo

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    transport = NcclTransport()
    export = announce(transport)
    infos = [NCCLWeightTransferInitInfo(**init_info([export], first_rank, num_receivers=4)) for first_rank in (0, 2)]
    trainer = NCCLTrainerInitInfo(*export.address, infos[0].world_size, rank=0)
    assert [info.rank_offset for info in infos] == [1, 3] and trainer.world_size == 5  # two replicas of two processes
    wire = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
    assert all(getattr(info, name) == getattr(trainer, name) for info in infos for name in wire)
    said: dict[int, str] = {}
    groups = []  # kept, for the first has the store

    def join(rank: int, info: NCCLWeightTransferInitInfo) -> None:
        group = StatelessProcessGroup.create(info.master_address, info.master_port, rank, info.world_size)
        groups.append(group)
        said[rank] = group.broadcast_obj("the trainer's id" if rank == 0 else None, src=0)

    places = [(0, trainer), *((info.rank_offset + i, info) for info in infos for i in range(2))]
    threads = [threading.Thread(target=join, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == dict.fromkeys(range(5), "the trainer's id")


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


@pytest.mark.parametrize(("transport", "first"), [("nccl", ["send to 1"]), ("gloo", [])])
def test_the_driver_has_the_actor_send_before_it_waits_for_the_rollout_to_load(
    transport: str, first: list[str]
) -> None:
    config = load_ppo_config([*REQUIRED, *SMALL, *OWN_POOL, f"actor_rollout_ref.rollout.weight_transport={transport}"])
    groups = {
        role: LocalWorkerGroup(ClassWithInitArgs(worker), role=role)
        for role, worker in (("actor", Actor), ("rollout", Rollout))
    }
    nothing = dict.fromkeys(("rule_scorer", "reward_columns", "kl_controller", "model_cost", "timer"))
    maker = ExperienceMaker(config=config, groups=groups, **nothing)
    Actor.calls.clear()
    maker.load_weights(Weights("what was exported", 7))
    assert Actor.calls == [*first, "load what was exported 7"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["device=cpu", *OWN_POOL], "is of GPUs, but trainer.device=cpu; set shared_memory or object_store"),
        (["actor_rollout_ref.rollout.name=hf", *OWN_POOL], "rollout.name=hf; set name=vllm, or gloo"),
        (["actor_rollout_ref.rollout.name=vllm_async", *OWN_POOL], "rollout.name=vllm_async; set name=vllm, or gloo"),
        ([], "takes no two processes of one GPU, but actor and rollout share the pool global_pool; set shared_memory"),
    ],
)
def test_nccl_is_refused_where_it_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        load_ppo_config([*REQUIRED, *SMALL, *NCCL, *overrides])
    (line,) = str(refused.value).splitlines()
    assert line.startswith("actor_rollout_ref.rollout.weight_transport=nccl") and message in line
