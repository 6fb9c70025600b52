"""The processes of a worker group as the driver sees them: they are started, waited for with a
deadline, and killed together."""

import functools
import math
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_like.single_controller.failure import CallTimeout, WorkerDied, WorkerError, WorkerStopped
from verl_like.single_controller.ray.node_watch import NodeWatch, of_memory_monitor
from verl_like.single_controller.ray.resource_pool import Bundle, RayResourcePool
from verl_like.single_controller.ray.worker_process import ProcessInfo, WorkerProcess
from verl_like.single_controller.shortage import Shortage, shortage_of
from verl_like.single_controller.worker import rank_environment
from verl_like.single_controller.worker_group import LOOK_S, ClassWithInitArgs

START_DEADLINE_S = 300.0  # process start, imports and constructors; models are loaded in init_model
READY_S = 30.0  # for fetching what is ready
_POLL_S = 0.5
# When a rank dies its peers often fail first ("connection closed by peer"): the death follows
# within this time.
_DEATH_GRACE_S = 2.0
_LOG_LINES = 40


class ProcessHandles:
    """The Ray actors of a pool, one per rank, which colocated roles share. They start in the
    background.

    Args:
        role: name in messages and in the names of the actors. Colocated roles are joined by +.
        pool: where the processes run, one per rank.
        classes: the worker class of each role, with the arguments of its constructor.
        name_prefix: actor names are `{name_prefix}_{rank}`; None for the role and a random suffix.
        worker_env: further environment variables of the processes. It may replace OMP_NUM_THREADS,
            but not what the group sets: rank, sizes, device and the master's address.
    """

    def __init__(
        self,
        role: str,
        pool: RayResourcePool,
        classes: dict[str, ClassWithInitArgs],
        name_prefix: str | None,
        worker_env: dict[str, str],
    ) -> None:
        self.role = role
        self.pool = pool
        own_node = ray.get_runtime_context().get_node_id()
        self.watch = _watch_of_driver(own_node)
        self._infos: list[ProcessInfo] | None = None
        self.submitting = threading.Lock()
        """Held while a call is submitted, so that all ranks get the calls of several threads in one
        order."""
        self.stopping = threading.Lock()
        """Held while `stopped` is set, so that the group is stopped once."""
        self.stopped: Exception | None = None  # why the actors are gone; later calls raise it
        device = "cpu"
        num_gpus: float = 0
        if pool.use_gpu:
            device = "cuda"
            num_gpus = 1 / pool.max_colocate_count
        environments = [
            rank_environment(rank, pool.world_size, local_rank, local_size, device)
            for rank, (local_rank, local_size) in enumerate(pool.local_ranks())
        ]
        own_names = {*environments[0], "MASTER_ADDR", "MASTER_PORT"}
        clash = sorted(worker_env.keys() & own_names)
        if clash:
            raise ValueError(
                f"worker_env of {role} sets {clash}, which the group sets itself: leave them out"
            )
        self.bundles = pool.take()  # reserves the pool, and waits for that, if nobody has yet
        threads = _threads_per_rank(self.bundles)
        prefix = name_prefix or f"{role}-{secrets.token_hex(3)}"
        self.names = [f"{prefix}_{rank}" for rank in range(pool.world_size)]
        """The names of the actors in Ray, by rank."""
        process_class = ray.remote(WorkerProcess)
        self.actors: list[Any] = []
        for rank, (group, index) in enumerate(self.bundles):
            env = environments[rank]
            env["OMP_NUM_THREADS"] = str(threads[rank])
            env.update(worker_env)  # last, because it may set the number of threads
            in_bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor_class = process_class.options(
                name=self.names[rank],
                num_cpus=1,
                num_gpus=num_gpus,
                scheduling_strategy=in_bundle,
                runtime_env={"env_vars": env},
            )
            self.actors.append(actor_class.remote())
        master = self.actors[0].reserve_master.remote()
        self._started = [actor.start.remote(master, classes) for actor in self.actors]
        _RUNNING.add(self)

    def wait_until_started(self, timeout: float = START_DEADLINE_S) -> list[ProcessInfo]:
        """Returns where each rank runs. Raises WorkerError if a constructor failed."""
        if self._infos is None:
            at_most = min(timeout, START_DEADLINE_S)
            self._infos = self.wait(self._started, self.role, "__init__", at_most)
        return self._infos

    def wait(
        self,
        references: Sequence[Any],
        role: str,
        method: str,
        timeout: float,
        results: Sequence[Any] = (),
    ) -> list[Any]:
        """Returns the values of one reference per rank (of the first ranks), each of them small,
        and then those of `results`.

        Raises WorkerError, WorkerDied (after which no process of the group is left) or CallTimeout,
        and RayError if only results were lost. Raises WorkerStopped for any group of this driver,
        as this one may wait for its results.
        """
        deadline = time.monotonic() + timeout
        everything = [*references, *results]
        while True:
            left = _seconds_until(deadline)
            try:
                # Ends at the first failure of any rank, also while others still run or wait for it
                # in a collective.
                return ray.get(everything, timeout=min(LOOK_S, left))
            except GetTimeoutError:
                if left <= LOOK_S:
                    break
                self.end_stopped(method)
            except RayError:
                break
        values = self._wait_for_each(references, role, method, timeout, deadline)
        return values + ray.get(list(results), timeout=READY_S)

    def _wait_for_each(
        self, references: Sequence[Any], role: str, method: str, timeout: float, deadline: float
    ) -> list[Any]:
        """Does the rest of `wait` after something has failed or is late: each rank says what it
        is."""
        give_up = math.inf
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        values = {}
        failures = {}
        pending = list(references)
        while pending:
            left = min(_POLL_S, _seconds_until(deadline))
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=left)
            for reference in ready:
                rank = rank_of[reference]
                try:
                    values[rank] = ray.get(reference, timeout=READY_S)
                except RayError as error:
                    failures[rank] = error
            running = sorted(rank_of[reference] for reference in pending)
            now = time.monotonic()
            if failures:
                give_up = min(give_up, now + _DEATH_GRACE_S)
                died = any(map(_is_death, failures.values()))
                if died or not running or now >= give_up:
                    raise self._as_worker_error(role, method, failures, running)
            elif running and now >= deadline:
                late = f"rank(s) {running} of {len(references)}"
                raise CallTimeout(role, method, timeout, late)
        return [values[rank] for rank in range(len(references))]

    def end_stopped(self, method: str) -> None:
        """Raises WorkerStopped if a process of this driver's groups is found stopped, after it
        killed that group.

        `method` is what this group runs. A caller that waits asks every `LOOK_S` seconds.
        """
        running = {}
        for group in list(_RUNNING):
            for rank in range(len(group.actors)):
                info = group._info(rank)
                if info.pid:  # otherwise it has not started yet
                    running[info] = (group, rank)
        found = self.watch.end_stopped(running)
        for info, what in found.items():
            group, rank = running[info]
            if group is not self:
                method = "its call"
            cause = f"{what}\n{_last_log_lines(info)}"
            error = WorkerStopped(group.role, rank, info.node, info.pid, method, cause)
            raise group.stop(error)

    def stop(self, reason: Exception) -> Exception:
        """Kills every process of the group. Returns why the group is stopped: for `reason`, or for
        that of an earlier call."""
        _RUNNING.discard(self)
        with self.stopping:
            if self.stopped is not None:
                return self.stopped
            self.stopped = reason
        for actor in self.actors:
            ray.kill(actor)
        self.pool.give_back(self.bundles)
        return reason

    def _as_worker_error(
        self, role: str, method: str, failures: dict[int, RayError], running: list[int]
    ) -> Exception:
        for rank, error in failures.items():
            if _is_death(error):
                if self.stopped is not None:
                    return self.stopped
                info = self._info(rank)
                reason, shortage = self._cause_of_death(error, info)
                text = f"{reason}\n{_last_log_lines(info)}"
                died = WorkerDied(role, rank, info.node, info.pid, method, text, shortage)
                return self.stop(died)
        rank = next(iter(failures))
        error = failures[rank]
        cause = getattr(error, "cause", None)
        if not isinstance(cause, WorkerError):
            info = self._info(rank)
            shortage = None
            if isinstance(cause, Exception):
                shortage = shortage_of(cause)
            text = str(error)
            cause = WorkerError(role, rank, info.node, info.pid, method, text, shortage)
        others = sorted(set(failures) - {rank})
        if others:
            cause.add_note(f"rank(s) {others} failed as well")
        if running:
            cause.add_note(
                f"rank(s) {running} are still in {method}; if they wait for rank {rank}, shut the "
                "group down"
            )
        return cause

    def _cause_of_death(self, error: RayError, info: ProcessInfo) -> tuple[str, Shortage | None]:
        """Returns why a process died, in a line. If it was killed because memory was short, it also
        returns who held it."""
        if isinstance(error, OutOfMemoryError):
            return of_memory_monitor(error)
        text = str(error).strip()
        _, _, last_line = text.rpartition("\n")
        reason, _, _ = last_line.partition(" Some common causes")
        shortage = self.watch.shortage(info.node_id, info.pid)
        if shortage:
            reason = f"The kernel's OOM killer has ended a process of the node meanwhile. {reason}"
        return reason, shortage

    def _info(self, rank: int) -> ProcessInfo:
        """Returns where a rank runs, or ran, as far as it is known."""
        if self._infos is not None:
            return self._infos[rank]
        unknown = ProcessInfo(0, "unknown", "", "")
        started = self._started[rank]
        ready, _ = ray.wait([started], timeout=0)
        if not ready:
            return unknown
        try:
            return ray.get(started, timeout=READY_S)
        except RayError:  # it failed while starting
            return unknown


def _seconds_until(deadline: float) -> float:
    """Returns the seconds that are left, at least 0, because Ray aborts if it is to wait for
    less."""
    left = deadline - time.monotonic()
    return max(0.0, left)


def _is_death(error: RayError) -> bool:
    """Returns True if the process has died, and False if the method has raised."""
    return not isinstance(error, RayTaskError)


_RUNNING: "weakref.WeakSet[ProcessHandles]" = weakref.WeakSet()
"""The processes of all groups of this driver."""


_watch_of_driver = functools.cache(NodeWatch)
"""Returns the one watch for all groups of a driver, by its node id. A new Ray has a new one."""


def _threads_per_rank(bundles: Sequence[Bundle]) -> list[int]:
    """Returns each process's share of its node's cores, among the bundles of all pools that are
    reserved there.

    Processes with more threads together than there are cores wait for each other at every barrier.
    """
    tables = ray.util.placement_group_table()
    reserved: Counter[str] = Counter()
    for table in tables.values():
        if table["state"] == "CREATED":
            reserved.update(table["bundles_to_node_id"].values())
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    # Ray's number of CPUs may be set higher than what this machine has, to fit more processes.
    own_cores = len(os.sched_getaffinity(0))
    cores[here] = min(cores[here], own_cores)
    threads = []
    for group, index in bundles:
        table = tables[group.id.hex()]
        node_id = table["bundles_to_node_id"][index]
        share = cores[node_id] // reserved[node_id]
        threads.append(max(1, share))
    return threads


def _last_log_lines(info: ProcessInfo) -> str:
    if not info.pid:
        return "(its process had not reported where it runs; see Ray's session log directory)"
    pattern = f"worker-*-{info.pid}.err"
    here = ray.get_runtime_context().get_node_id()
    if info.node_id != here:
        return f"(its log is on node {info.node}: {info.logs_dir}/{pattern} and .out)"
    lines = []
    paths = Path(info.logs_dir).glob(f"worker-*-{info.pid}.*")
    for path in sorted(paths):
        text = path.read_text(errors="replace")
        for line in text.splitlines():
            if not line.startswith(":"):  # those are Ray's own marks
                lines.append(line[:200])
    shown = "\n".join(lines[-_LOG_LINES:]) or "(empty)"
    return f"last lines of {info.logs_dir}/{pattern} and .out:\n{shown}"
