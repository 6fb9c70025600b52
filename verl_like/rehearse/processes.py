"""Measures the processes of a run: how much of its GPU and of the host's memory each takes."""

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
"""The last line of an error of vLLM or torch that says that a GPU, or an engine's share of it, is
too small."""

Command = Mapping[str, Any]
"""The arguments of `config_of` by name."""


@dataclass(frozen=True)
class Process:
    """One rank of a worker group, and its measurements."""

    roles: tuple[str, ...]
    rank: int
    num_ranks: int
    phases: Sequence[Measured]
    is_counted: bool = False
    """True if nothing was measured, and the numbers are those of the plan. Then either no process
    ran, or it has a `refusal`."""
    note: str = ""
    """A note for the user, shown below the phases."""
    refusal: str = ""
    """The error of a process that does not even start alone on a GPU of the given size."""

    @property
    def name(self) -> str:
        roles = "+".join(self.roles)
        counted = ", counted" if self.is_counted else ""
        return f"{roles} rank {self.rank} of {self.num_ranks}{counted}"


@dataclass(frozen=True)
class Pool:
    """The processes that share the GPUs of a pool. One rank or two stand for all ranks of a worker
    group."""

    name: str
    nodes: Sequence[int]
    """The number of GPUs on each node."""
    processes: Sequence[Process]

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes)


def measure_run(
    null_gpu: NullGpu,
    command: Command,
    pools: Sequence[PlannedPool],
    device_bytes: int | None = None,
) -> list[Pool]:
    """Runs the first and the last rank of each training process on a device on which everything
    fits, and each rollout engine on a device of `device_bytes`.

    Engines that the null GPU does not run are counted by the plan, and all of them if there is no
    `device_bytes`.
    """
    training = []
    with ThreadPoolExecutor(2) as two_at_a_time:
        for pool in pools:
            last_rank = sum(pool.nodes) - 1
            ranks = sorted({0, last_rank}) if pool.models else []
            futures = [
                two_at_a_time.submit(measure_rank, null_gpu, command, pool, rank, UNLIMITED)
                for rank in ranks
            ]
            training.append(futures)
        try:
            ran = []
            for futures in training:
                ran.append([future.result() for future in futures])
        except BaseException:
            two_at_a_time.shutdown(wait=False, cancel_futures=True)
            raise
    measured = []
    for pool, processes in zip(pools, ran, strict=True):
        if pool.rollout and device_bytes is not None and can_run(pool.config):
            processes.append(measure_engine(null_gpu, command, pool, device_bytes))
        elif pool.rollout:
            processes.append(counted_engine(pool))
        measured.append(Pool(pool.name, pool.nodes, processes))
    return measured


def measure_rank(
    null_gpu: NullGpu, command: Command, pool: PlannedPool, rank: int, device_bytes: int
) -> Process:
    """Runs a rank of a pool's training process. Raises RuntimeError, with the last lines that it
    printed, if it fails."""
    began = time.monotonic()
    task = {"command": command, "pool": pool.name, "rank": rank}
    answer = null_gpu.run(TRAINING, task, device_bytes)
    phases = [Measured(**phase) for phase in answer]
    roles = tuple(model.name for model in pool.models)
    process = Process(roles, rank, sum(pool.nodes), phases)
    say_measured(pool, process, began)
    return process


def say_measured(pool: PlannedPool, process: Process, began: float) -> None:
    """Says on standard error how long a measurement took that began at `began`."""
    seconds = time.monotonic() - began
    sys.stderr.write(f"{pool.name}, {process.name}: measured in {seconds:.0f} s\n")


def can_run(config: Any) -> bool:
    """Returns whether the null GPU runs the rollout engine: vLLM in one process, without a class of
    the user for the role."""
    rollout = config.actor_rollout_ref.rollout
    is_built_in = Role.Rollout not in config.worker_classes
    return is_built_in and rollout.name != "hf" and rollout.tensor_model_parallel_size == 1


def measure_engine(
    null_gpu: NullGpu, command: Command, pool: PlannedPool, device_bytes: int
) -> Process:
    """Runs the rollout engine of a pool on a GPU of the real size, because it takes a share of the
    GPU.

    If the GPU is too small for the engine, the result has the error and the numbers of the plan.
    Raises RuntimeError, with the last lines that the engine printed, if it fails for another
    reason.
    """
    began = time.monotonic()
    try:
        answer = null_gpu.run(ENGINE, command, device_bytes)
    except RuntimeError as error:
        lines = str(error).splitlines()
        of_memory = [line for line in lines if SHORT_OF_MEMORY.search(line)]
        if not of_memory:
            raise
        said = of_memory[-1].removeprefix("[rank0]: ")  # torch puts this before what a rank says
        return replace(counted_engine(pool), refusal=said)
    phases = [Measured(**phase) for phase in answer["phases"]]
    num_ranks = sum(pool.nodes)
    process = Process((Role.Rollout,), 0, num_ranks, phases, note=answer["note"])
    say_measured(pool, process, began)
    return process


def refusal_at(null_gpu: NullGpu, command: Command, pool: PlannedPool, rank: int, room: int) -> str:
    """What torch says when a rank has only `room` bytes of its GPU, or "" if the rank runs."""
    try:
        measure_rank(null_gpu, command, pool, rank, max(1, room))
    except RuntimeError as error:
        lines = str(error).splitlines()
        for line in lines:
            if "OutOfMemoryError" in line:
                return line
        return lines[-1]
    return ""


def counted_engine(pool: PlannedPool) -> Process:
    """The rollout engine with the numbers of the plan: its share of the GPU while it generates, and
    what it keeps while other roles work."""
    share = pool.rollout
    assert share
    parts_of_phase = {"rollout generation": share.working, "between calls": share.resting}
    phases = []
    for phase, parts in parts_of_phase.items():
        total = int(sum(parts.values()))
        measured = Measured(phase, total, total, {"engine": total})
        phases.append(measured)
    num_ranks = sum(pool.nodes)
    return Process((Role.Rollout,), 0, num_ranks, phases, is_counted=True)
