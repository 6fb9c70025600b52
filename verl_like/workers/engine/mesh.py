"""The ranks of a worker group: how they find each other, and who shares parameters and sequences with whom."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_like.workers.planning.partition import num_groups

COLLECTIVE_DEADLINE = timedelta(minutes=30)
"""Longest wait of a rank for its peers: they may still be reading a large model."""


def init_process_group(device: str, rank: int, world_size: int) -> None:
    """Joins the ranks of this worker group; once a process, so that roles of one process share the group."""
    if dist.is_initialized():
        return
    if device == "cuda":
        torch.cuda.set_device(0)
    alone: dict[str, Any] = {"store": dist.HashStore()} if world_size == 1 else {}
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_DEADLINE, **alone)


def build_mesh(device: str, fsdp_size: int, sequence_parallel_size: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of all ranks, seen in two ways: (replica, shard) for parameters and (data, sequence) for a batch.

    One copy of the parameters is sharded over `fsdp_size` ranks, -1 for all. A single copy has a mesh of two dimensions
    too: FSDP2 then adds up the micro-batches of a step in float32, also for parameters that are stored in bfloat16.
    Neither view divides the other: sequences may be shared by more ranks than parameters, or by fewer. The second view
    is None where no sequence is shared.

    Raises:
        ValueError: a size does not divide the number of ranks.
    """
    ranks = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("rank",))
    shards = ranks.size() if fsdp_size == -1 else fsdp_size
    replicas = num_groups(shards, ranks.size(), "ranks of the pool", key="fsdp_config.fsdp_size")
    parameters = ranks._unflatten(0, (replicas, shards), ("replica", "shard"))
    if sequence_parallel_size == 1:
        return parameters, None
    shards_of_batch = ranks.size() // sequence_parallel_size
    return parameters, ranks._unflatten(0, (shards_of_batch, sequence_parallel_size), ("data", "sequence"))
