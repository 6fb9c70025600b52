"""The processes of a run, and what each of them holds of its GPU."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_like.rehearse.measured import Measured
from verl_like.rehearse.null_gpu import UNLIMITED, NullGpu
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.memory import ASLEEP, memory_phases
from verl_like.trainer.roles import Role, process_groups

TRAINING = "verl_like.rehearse.training_process"


@dataclass(frozen=True)
class Process:
    """One rank of a worker group."""

    roles: tuple[str, ...]
    rank: int
    num_ranks: int
    phases: tuple[Measured, ...]
    is_counted: bool = False
    """Whether its numbers are those of the plan, and no process ran."""

    @property
    def name(self) -> str:
        counted = ", counted" if self.is_counted else ""
        return f"{'+'.join(self.roles)} rank {self.rank} of {self.num_ranks}{counted}"


@dataclass(frozen=True)
class Pool:
    """The processes that share the GPUs of a pool, each kind once or by two of its ranks."""

    name: str
    num_gpus: int
    processes: tuple[Process, ...]


def measure_run(null_gpu: NullGpu, config: PPOConfig, command: Mapping[str, Any], device_bytes: int) -> list[Pool]:
    """Runs two ranks of each training process on a device on which everything fits, and counts the engine."""
    mapping = {role: config.role_mapping[role] for role in config.active_roles}
    processes: dict[str, list[Process]] = {pool: [] for pool in mapping.values()}
    for pool, roles in process_groups(mapping):
        num_ranks = config.num_processes(roles[0])
        if roles == [Role.Rollout]:
            processes[pool].append(counted_engine(config, num_ranks, device_bytes))
            continue
        for rank in sorted({0, num_ranks - 1}):
            began = time.monotonic()
            task = {**command, "roles": roles, "rank": rank, "world_size": num_ranks}
            measured = null_gpu.run(TRAINING, task, UNLIMITED)
            process = Process(tuple(roles), rank, num_ranks, tuple(Measured(**phase) for phase in measured))
            processes[pool].append(process)
            sys.stderr.write(f"{pool}, {process.name}: measured in {time.monotonic() - began:.0f} s\n")
    return [Pool(name, sum(config.resource_pool_spec[name]), tuple(own)) for name, own in processes.items()]


def counted_engine(config: PPOConfig, num_ranks: int, device_bytes: int) -> Process:
    """The rollout engine by the plan: its share while it generates, and what it keeps meanwhile others work."""
    rollout = config.actor_rollout_ref.rollout
    (generation,) = [phase for phase in memory_phases(config, device_bytes) if phase.name == "generation"]
    working = int(sum(size for part, size in generation.parts.items() if part.startswith("engine's")))
    asleep = 0 if rollout.name == "hf" else int(ASLEEP)
    resting = asleep if rollout.free_cache_engine else working
    phases = tuple(
        Measured(phase, size, size, {"engine": size})
        for phase, size in (("rollout generation", working), ("between calls", resting))
    )
    return Process((Role.Rollout,), 0, num_ranks, phases, is_counted=True)
