"""The processes of a run, and what each of them holds of its GPU."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_like.rehearse.measured import Measured
from verl_like.rehearse.null_gpu import UNLIMITED, NullGpu
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.roles import Role, process_groups

TRAINING, ENGINE = "verl_like.rehearse.training_process", "verl_like.rehearse.engine_process"


@dataclass(frozen=True)
class Process:
    """One rank of a worker group."""

    roles: tuple[str, ...]
    rank: int
    num_ranks: int
    phases: tuple[Measured, ...]
    error: str = ""
    """The last lines of one that failed, as torch says that memory is short."""

    @property
    def name(self) -> str:
        return f"{'+'.join(self.roles)} rank {self.rank} of {self.num_ranks}"


@dataclass(frozen=True)
class Pool:
    """The processes that share the GPUs of a pool, each kind once or by two of its ranks."""

    name: str
    num_gpus: int
    processes: tuple[Process, ...]


def measure_run(null_gpu: NullGpu, config: PPOConfig, command: Mapping[str, Any], device_bytes: int) -> list[Pool]:
    """Runs a process of each kind on a device on which everything fits, and an engine on one of the real size."""
    mapping = {role: config.role_mapping[role] for role in config.active_roles}
    processes: dict[str, list[Process]] = {pool: [] for pool in mapping.values()}
    for pool, roles in process_groups(mapping):
        is_engine = roles == [Role.Rollout]
        num_ranks = config.num_processes(roles[0])
        for rank in sorted({0} if is_engine else {0, num_ranks - 1}):
            began = time.monotonic()
            task = {**command, "roles": roles, "rank": rank, "world_size": num_ranks}
            size = device_bytes if is_engine else UNLIMITED
            measured = null_gpu.run(ENGINE if is_engine else TRAINING, task, size)
            process = Process(tuple(roles), rank, num_ranks, tuple(Measured(**phase) for phase in measured))
            processes[pool].append(process)
            sys.stderr.write(f"{pool}, {process.name}: measured in {time.monotonic() - began:.0f} s\n")
    return [Pool(name, sum(config.resource_pool_spec[name]), tuple(own)) for name, own in processes.items()]
