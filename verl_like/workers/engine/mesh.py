"""The ranks of a worker group: how they form a process group, and which of them share parameters
and sequences."""

from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_like.single_controller.network import store_of_group
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.planning.partition import num_groups

COLLECTIVE_DEADLINE = timedelta(minutes=30)
"""How long a rank waits for other ranks, which may still be reading a large model."""

_own_ranks: dist.ProcessGroup | None = None

JOIN_DEADLINE = timedelta(minutes=10)
"""How long a rank waits for the ranks of other trainers of its model, which may still be
starting."""


def init_process_group(device: str, rank: int, world_size: int) -> None:
    """Makes torch's process group of the ranks of this worker group.

    With a `JointTrainer` the ranks of the other trainers belong to it, too, in the order of the
    trainers. It is made once a process, so that the roles of a process share it. Raises
    TimeoutError, which names the missing trainers, if not all of them join.
    """
    global _own_ranks
    if dist.is_initialized():
        return
    if device == "cuda":
        torch.cuda.set_device(0)
    num_own_ranks = world_size
    if trainer := JointTrainer.of_process():
        store = _meet(trainer, rank, world_size)
        rank += trainer.index * world_size
        world_size *= trainer.count
    elif world_size > 1:
        store = store_of_group(rank, COLLECTIVE_DEADLINE)
    else:
        store = dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_DEADLINE
    )
    _own_ranks = None
    if trainer:
        # All ranks take part in making each group.
        _own_ranks, _groups_of_trainers = dist.new_subgroups(num_own_ranks)


def own_ranks() -> dist.ProcessGroup | None:
    """Returns the process group of this worker group's ranks, without those of other trainers.

    None means the group of all ranks, if there are no other trainers.
    """
    return _own_ranks


def num_trainers() -> int:
    """Returns the number of trainers whose ranks are in the process group."""
    trainer = JointTrainer.of_process()
    return trainer.count if trainer else 1


def _meet(trainer: JointTrainer, rank: int, world_size: int) -> dist.Store:
    """Waits until the ranks of all trainers have joined, and returns the store that they share.

    Each rank joins by setting a key of its own.
    """
    keys = []
    for index in range(trainer.count):
        of_trainer = [f"{index} {each} {world_size}" for each in range(world_size)]
        keys.append(of_trainer)
    address = (trainer.master_addr, trainer.master_port)
    store = None
    try:
        server = dist.TCPStore(*address, timeout=JOIN_DEADLINE)
        store = dist.PrefixStore(trainer.processes, server)
        own_keys = keys[trainer.index]
        all_keys = list(chain.from_iterable(keys))
        store.set(own_keys[rank], "")
        store.wait(all_keys, JOIN_DEADLINE)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        missing: Any = "0 (no store)"
        if store:
            missing = [index for index, own in enumerate(keys) if not store.check(own)]
        raise TimeoutError(
            f"trainer(s) {missing} of {trainer.count} did not bring {world_size} rank(s) of "
            f"{trainer.processes} to {address} within {JOIN_DEADLINE}: start all, with the same "
            "address and numbers of trainers and ranks."
        ) from error
    server.set_timeout(COLLECTIVE_DEADLINE)
    return store


class Meshes(NamedTuple):
    """How the ranks share a model and a batch."""

    parameters: DeviceMesh
    """(replica, shard). It has two dimensions even for a single copy, because FSDP2 then adds the
    micro-batches of a step in float32, also for parameters that are stored in bfloat16."""
    experts: DeviceMesh | None
    """(replica, part, expert), with expert parallelism. The ranks of a shard are `part` times
    `expert`: ranks along `expert` have different experts, and those along `part` share these."""
    batch: DeviceMesh | None
    """(data, sequence), if several ranks share a sequence. It is independent of the others: more or
    fewer ranks may share a sequence than share parameters."""


def build_meshes(
    device: str, num_shards: int, sequence_parallel_size: int, expert_parallel_size: int = 1
) -> Meshes:
    """Returns the meshes of all ranks.

    One copy of the parameters is sharded over `num_shards` ranks; -1 means all ranks of a trainer.
    Each of several trainers has its own copies, so that it can export alone.

    Raises ValueError for a size that does not divide the number of ranks.
    """
    num_ranks = dist.get_world_size()
    ranks = init_device_mesh(device, (num_ranks,), mesh_dim_names=("rank",))
    num_own_ranks = num_ranks // num_trainers()
    shards = num_own_ranks if num_shards == -1 else num_shards
    copies = num_groups(shards, num_own_ranks, "ranks of the pool", key="fsdp_config.fsdp_size")
    replicas = num_trainers() * copies
    parameters = ranks._unflatten(0, (replicas, shards), ("replica", "shard"))
    experts = None
    if expert_parallel_size > 1:
        parts = num_groups(
            expert_parallel_size,
            shards,
            "ranks that share the parameters",
            key="fsdp_config.expert_parallel_size",
        )
        shape = (replicas, parts, expert_parallel_size)
        experts = ranks._unflatten(0, shape, ("replica", "part", "expert"))
    batch = None
    if sequence_parallel_size > 1:
        shape_of_batch = (num_ranks // sequence_parallel_size, sequence_parallel_size)
        batch = ranks._unflatten(0, shape_of_batch, ("data", "sequence"))
    return Meshes(parameters, experts, batch)
