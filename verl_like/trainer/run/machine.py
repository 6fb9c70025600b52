"""Checks that the pools of a run fit on this machine, if Ray is started here and the run joins no
cluster."""

import os
from collections.abc import Sequence

import torch

from verl_like.single_controller.ray.cluster import Resources, assign
from verl_like.single_controller.ray.resource_pool import RayResourcePool


def check_machine(
    pools: Sequence[RayResourcePool], device: str, num_cpus: int | None, *, keys: str
) -> None:
    """Raises ValueError, with the sums, unless this machine has the CPUs and devices that the pools
    need. `keys` names the keys of the configuration that set the pools."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "trainer.device=cuda, but this machine has no CUDA device: give trainer.device=cpu "
            "(of PPO: device=cpu) to compute on the CPU, or ray_kwargs.ray_init.address to use a "
            "cluster that has GPUs."
        )
    node: Resources = {
        "CPU": num_cpus or os.cpu_count() or 1,
        "GPU": torch.cuda.device_count() if device == "cuda" else 0,
    }
    entries: list[Resources] = []
    for pool in pools:
        entries += pool.node_requests()
    if assign(entries, {"here": node}) is not None:
        return
    needed: Resources = {}
    for entry in entries:
        for kind, amount in entry.items():
            needed[kind] = needed.get(kind, 0) + amount
    sizes = "\n".join(f"  {pool.name:<32} {pool.process_on_nodes} processes" for pool in pools)
    raise ValueError(
        f"the resource pools do not fit on this machine:\n{sizes}\n"
        f"  each process takes {pools[0].bundle_resources()}, together {needed}; this machine has "
        f"{node}\n"
        f"Make the pools smaller ({keys}), set ray_kwargs.ray_init.num_cpus to have more "
        "processes than cores, or give ray_kwargs.ray_init.address of a cluster."
    )
