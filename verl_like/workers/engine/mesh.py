"""The ranks of a worker group: how they find each other, and who shares parameters and sequences
with whom."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_like.single_controller.network import open_store
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.planning.partition import num_groups

COLLECTIVE_DEADLINE = timedelta(minutes=30)
"""Longest wait of a rank for its peers: they may still be reading a large model."""

_own_ranks: dist.ProcessGroup | None = None

JOIN_DEADLINE = timedelta(minutes=10)
"""Longest wait of a rank for the ranks of the other trainers of its model: their processes may
still be starting."""


def init_process_group(device: str, rank: int, world_size: int) -> None:
    """Joins the ranks of this worker group, and with a `JointTrainer` those of the other trainers,
    in their order.

    Once a process, so that roles of one process share the group. TimeoutError names the trainers
    that do not come.
    """
    if dist.is_initialized():
        return
    if device == "cuda":
        torch.cuda.set_device(0)
    if trainer := JointTrainer.of_process():
        store = _meet(trainer, rank, world_size)
        rank = trainer.index * world_size + rank
        world_size = trainer.count * world_size
    else:
        store = _store_of_group(rank) if world_size > 1 else dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_DEADLINE
    )
    _remember_own_ranks(trainer)


def _remember_own_ranks(trainer: JointTrainer | None) -> None:
    global _own_ranks
    _own_ranks = None
    if trainer:
        size = dist.get_world_size() // trainer.count
        groups = [
            dist.new_group(range(first, first + size))
            for first in range(0, trainer.count * size, size)
        ]
        _own_ranks = groups[trainer.index]


def own_ranks() -> dist.ProcessGroup | None:
    """The process group of this worker group's ranks, without those of other trainers; None is that
    of all ranks."""
    return _own_ranks


def _store_of_group(rank: int) -> dist.Store:
    """The store of this worker group, which rank 0 opens."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        return open_store(host, port, timeout=COLLECTIVE_DEADLINE)
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=COLLECTIVE_DEADLINE
    )


def _meet(trainer: JointTrainer, rank: int, world_size: int) -> dist.Store:
    """The store of the trainers' process group, once all of their ranks are there."""
    keys = {
        index: [f"{index} {i} {world_size}" for i in range(world_size)]
        for index in range(trainer.count)
    }
    address = (trainer.master_addr, trainer.master_port)
    store = None
    try:
        server = dist.TCPStore(
            *address, is_master=False, timeout=JOIN_DEADLINE, wait_for_workers=False
        )
        store = dist.PrefixStore(trainer.processes, server)
        store.set(keys[trainer.index][rank], "")
        store.wait([key for of_trainer in keys.values() for key in of_trainer], JOIN_DEADLINE)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        missing = (
            [index for index in keys if not store.check(keys[index])] if store else "0 (no store)"
        )
        raise TimeoutError(
            f"trainer(s) {missing} of {trainer.count} did not bring {world_size} rank(s) of "
            f"{trainer.processes} to {address} within {JOIN_DEADLINE}: start all, with the same "
            "address and numbers of trainers and ranks."
        ) from error
    server.set_timeout(COLLECTIVE_DEADLINE)
    return store


def build_mesh(
    device: str, num_shards: int, sequence_parallel_size: int
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of all ranks, seen in two ways: (replica, shard) for parameters and (data, sequence)
    for a batch.

    One copy of the parameters is sharded over `num_shards` ranks, -1 for all. Each of several
    trainers has its own copies, so that it can export alone. A single copy has a mesh of two
    dimensions too: FSDP2 then adds up the micro-batches of a step in float32, also for parameters
    that are stored in bfloat16. Neither view divides the other: sequences may be shared by more
    ranks than parameters, or by fewer. The second view is None where no sequence is shared. Raises
    ValueError for a size that does not divide the number of ranks.
    """
    ranks = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("rank",))
    trainer = JointTrainer.of_process()
    num_trainers = trainer.count if trainer else 1
    own = ranks.size() // num_trainers
    shards = own if num_shards == -1 else num_shards
    replicas = num_trainers * num_groups(
        shards, own, "ranks of the pool", key="fsdp_config.fsdp_size"
    )
    parameters = ranks._unflatten(0, (replicas, shards), ("replica", "shard"))
    if sequence_parallel_size == 1:
        return parameters, None
    shards_of_batch = ranks.size() // sequence_parallel_size
    return parameters, ranks._unflatten(
        0, (shards_of_batch, sequence_parallel_size), ("data", "sequence")
    )
