"""The processes of a run, and what each of them holds of its GPU."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from verl_like.rehearse.measured import Measured
from verl_like.rehearse.null_gpu import UNLIMITED, NullGpu
from verl_like.trainer.config.roles import Role
from verl_like.trainer.memory.sums import PlannedPool

TRAINING = "verl_like.rehearse.training_process"
ENGINE = "verl_like.rehearse.engine_process"
SHORT_OF_MEMORY = re.compile(r"Error: .*(memory|KV cache)", re.IGNORECASE)
"""What vLLM and torch say when a GPU, or an engine's share of it, is too small."""


@dataclass(frozen=True)
class Process:
    """One rank of a worker group."""

    roles: tuple[str, ...]
    rank: int
    num_ranks: int
    phases: tuple[Measured, ...]
    is_counted: bool = False
    """Whether its numbers are those of the plan, and no process ran."""
    note: str = ""
    """What there is to know beside its phases."""
    refusal: str = ""
    """Of a process that does not start on a GPU of that size alone: its error."""

    @property
    def name(self) -> str:
        counted = ", counted" if self.is_counted else ""
        return f"{'+'.join(self.roles)} rank {self.rank} of {self.num_ranks}{counted}"


@dataclass(frozen=True)
class Pool:
    """The processes that share the GPUs of a pool, each kind once or by two of its ranks."""

    name: str
    nodes: tuple[int, ...]
    """GPUs on each node."""
    processes: tuple[Process, ...]

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes)


def measure_run(
    null_gpu: NullGpu,
    command: Mapping[str, Any],
    pools: Sequence[PlannedPool],
    device_bytes: int | None = None,
) -> list[Pool]:
    """Runs two ranks of each training process on a device on which everything fits, and an engine
    on one of its size.

    Without `device_bytes` engines are counted, as are those that the null GPU does not run.
    """
    ranks = [
        (pool, rank) for pool in pools if pool.models for rank in sorted({0, sum(pool.nodes) - 1})
    ]

    def measured_rank(of: tuple[PlannedPool, int]) -> Process:
        pool, rank = of
        return measure_rank(null_gpu, command, pool, rank, UNLIMITED)

    with ThreadPoolExecutor(2) as two_at_a_time:
        ran = list(two_at_a_time.map(measured_rank, ranks))
    measured = []
    for pool in pools:
        processes = [
            process for (its_pool, _), process in zip(ranks, ran, strict=True) if its_pool is pool
        ]
        if pool.rollout:
            if device_bytes is not None and can_run(pool.config):
                processes.append(measure_engine(null_gpu, command, pool, device_bytes))
            else:
                processes.append(counted_engine(pool))
        measured.append(Pool(pool.name, tuple(pool.nodes), tuple(processes)))
    return measured


def measure_rank(
    null_gpu: NullGpu, command: Mapping[str, Any], pool: PlannedPool, rank: int, device_bytes: int
) -> Process:
    """Runs a rank of the training process of a pool. Raises RuntimeError, with its last lines, if
    it ends early."""
    began = time.monotonic()
    num_ranks = sum(pool.nodes)
    roles = tuple(model.name for model in pool.models)
    task = {**command, "pool": pool.name, "rank": rank, "world_size": num_ranks}
    measured = null_gpu.run(TRAINING, task, device_bytes)
    process = Process(roles, rank, num_ranks, tuple(Measured(**phase) for phase in measured))
    sys.stderr.write(f"{pool.name}, {process.name}: measured in {time.monotonic() - began:.0f} s\n")
    return process


def can_run(config: Any) -> bool:
    """Whether the engine is vLLM in one process, and nobody's own class for the role."""
    rollout = config.actor_rollout_ref.rollout
    is_built_in = Role.Rollout not in config.worker_classes
    return is_built_in and rollout.name != "hf" and rollout.tensor_model_parallel_size == 1


def measure_engine(
    null_gpu: NullGpu, command: Mapping[str, Any], pool: PlannedPool, device_bytes: int
) -> Process:
    """Runs the rollout engine of a pool on a GPU of the real size, of which it takes a share.

    Raises RuntimeError, with its last lines, if it ends early for another reason than memory.
    """
    began = time.monotonic()
    roles = (Role.Rollout,)
    num_ranks = sum(pool.nodes)
    try:
        answer = null_gpu.run(ENGINE, command, device_bytes)
    except RuntimeError as error:
        of_memory = [line for line in str(error).splitlines() if SHORT_OF_MEMORY.search(line)]
        if not of_memory:
            raise
        said = of_memory[-1].removeprefix("[rank0]: ")  # by torch, before what a rank says
        return replace(counted_engine(pool), refusal=said)
    phases = tuple(Measured(**phase) for phase in answer["phases"])
    process = Process(roles, 0, num_ranks, phases, note=answer["note"])
    sys.stderr.write(f"{pool.name}, {process.name}: measured in {time.monotonic() - began:.0f} s\n")
    return process


def refusal_at(
    null_gpu: NullGpu, command: Mapping[str, Any], pool: PlannedPool, rank: int, room: int
) -> str:
    """What torch says where a rank has only that many bytes of its GPU; empty where it runs."""
    try:
        measure_rank(null_gpu, command, pool, rank, max(1, room))
    except RuntimeError as error:
        lines = str(error).splitlines()
        return next((line for line in lines if "OutOfMemoryError" in line), lines[-1])
    return ""


def counted_engine(pool: PlannedPool) -> Process:
    """The rollout engine by the plan: its share while it generates, and what it keeps meanwhile
    others work."""
    assert pool.rollout
    sizes = {"rollout generation": pool.rollout.working, "between calls": pool.rollout.resting}
    totals = {phase: int(sum(parts.values())) for phase, parts in sizes.items()}
    phases = [Measured(phase, total, total, {"engine": total}) for phase, total in totals.items()]
    return Process((Role.Rollout,), 0, sum(pool.nodes), tuple(phases), is_counted=True)
