"""Looks at worker processes on their nodes: which of them are stopped, and who held how much memory
before one was killed."""

import contextlib
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_like.single_controller.ray.worker_process import ProcessInfo
from verl_like.single_controller.shortage import Shortage, largest_processes, title_of
from verl_like.single_controller.worker_group import LOOK_S

_ANSWER_S = 5.0  # a node that takes longer is looked at the next time
# Of the container, or else of the machine
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


@dataclass(frozen=True)
class Look:
    """What was found on a node."""

    stopped: Mapping[int, Mapping[int, str]]
    """By a worker's process id: the stopped ones among its process and those below it, as process
    id -> title. A worker without a stopped process is not in it."""
    memory: str
    """The table that `largest_processes` returns."""
    num_oom_kills: int
    """How many processes the kernel has killed so far for want of memory."""


class NodeAgent:
    """Looks at processes of the node that it runs on."""

    def look(self, pids: Sequence[int]) -> Look:
        """Returns what is found. A worker that has ended is left out, and so is one of which a
        child ends during the look. A child in another process group than its worker is passed
        over, because whoever started it has a deadline for it."""
        stopped = {}
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                worker = psutil.Process(pid)
                children = worker.children(recursive=True)
                titles = {}
                for each in (worker, *children):
                    if each.status() != psutil.STATUS_STOPPED:
                        continue
                    group = os.getpgid(each.pid)
                    if group == os.getpgid(pid):
                        titles[each.pid] = title_of(each)
                if titles:
                    stopped[pid] = titles
        memory = largest_processes()
        return Look(stopped, memory, _num_oom_kills())

    def kill(self, pids: Iterable[int]) -> None:
        """Kills processes, also stopped ones, which Ray's own kill may miss."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class NodeWatch:
    """What a driver has seen of its processes.

    It looks at its own node by itself, and at others through an agent.
    """

    def __init__(self, own_node: str) -> None:
        self.own_node = own_node
        self.own_agent = NodeAgent()
        self.looking = threading.RLock()
        self.agents: dict[str, Any] = {}
        """Actor handles, by node id."""
        self.asked: dict[str, Any] = {}
        """References to answers that have not come, by node id."""
        self.stopped_since: dict[tuple[str, int], float] = {}
        """When a worker, by node and process id, was first found stopped."""
        self.memory: dict[str, str] = {}
        """The table of memory of the last look, by node id."""
        self.num_oom_kills = {own_node: _num_oom_kills()}
        """The count at the last look, by node id. On the driver's node there is one from the
        beginning."""

    def end_stopped(self, places: Iterable[ProcessInfo]) -> dict[ProcessInfo, str]:
        """Kills those of the workers that are stopped, as they were one look before, and says what
        was found.

        One look alone may see a job that is just being continued. Threads that look at the same
        time look in turn.
        """
        pids: dict[str, list[int]] = defaultdict(list)
        place_of = {}
        for place in places:
            pids[place.node_id].append(place.pid)
            place_of[place.node_id, place.pid] = place
        found = {}
        with self.looking:
            before = self.stopped_since
            self.stopped_since = {}
            looks = self.look(pids)
            for node, look in looks.items():
                self.memory[node] = look.memory
                self.num_oom_kills[node] = look.num_oom_kills
                for pid, titles in look.stopped.items():
                    worker = (node, pid)
                    now = time.monotonic()
                    since = before.get(worker, now)
                    self.stopped_since[worker] = since
                    seconds = now - since
                    if seconds > LOOK_S / 2:
                        place = place_of[worker]
                        found[place] = _what_was_stopped(titles, seconds)
                        self.kill(node, [*titles, pid])
        return found

    def look(self, pids: Mapping[str, Sequence[int]]) -> dict[str, Look]:
        """Returns what is found of the processes of each node, by its id. Nodes that do not answer
        are left out."""
        looks = {}
        for node, its_pids in pids.items():
            if node == self.own_node:
                looks[node] = self.own_agent.look(its_pids)
            elif node not in self.asked:
                self.asked[node] = self.agent(node).look.remote(its_pids)
        if not self.asked:
            return looks
        node_of = {reference: node for node, reference in self.asked.items()}
        asked = list(node_of)
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        for reference in answered:
            node = node_of[reference]
            del self.asked[node]
            try:
                looks[node] = ray.get(reference, timeout=_ANSWER_S)
            except ray.exceptions.RayError:  # the agent has died, maybe with its node
                self.agents.pop(node, None)
        return looks

    def agent(self, node: str) -> Any:
        """Returns the agent of another node, which is started once."""
        if node not in self.agents:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            agent_class = ray.remote(NodeAgent)
            on_node = agent_class.options(num_cpus=0, scheduling_strategy=there)
            self.agents[node] = on_node.remote()
        return self.agents[node]

    def kill(self, node: str, pids: Sequence[int]) -> None:
        """Kills processes of a node. It waits for that, because the driver may end right after."""
        if node == self.own_node:
            self.own_agent.kill(pids)
            return
        killing = self.agent(node).kill.remote(pids)
        ray.wait([killing], timeout=_ANSWER_S)

    def shortage(self, node: str, pid: int) -> Shortage | None:
        """Returns who held how much memory if the kernel has killed any process of the node for
        want of memory since the last look. It is called after the process `pid` has died.

        If the table of the last look has that process, it is returned, because it says how much the
        process held. Otherwise it is the table of now.
        """
        with self.looking:
            if node not in self.num_oom_kills:
                return None
            look = self.look({node: []}).get(node)
            if look is None or look.num_oom_kills == self.num_oom_kills[node]:
                return None
            self.num_oom_kills[node] = look.num_oom_kills
        memory = self.memory.get(node, "")
        if f"pid {pid} " not in memory:
            memory = look.memory
        return Shortage("host", memory)


def _what_was_stopped(titles: Mapping[int, str], seconds: float) -> str:
    processes = ", ".join(f"process {pid} ({title})" for pid, title in titles.items())
    return f"{processes} was stopped for at least {seconds:.0f} s, so it was killed"


def of_memory_monitor(error: ray.exceptions.OutOfMemoryError) -> tuple[str, Shortage]:
    """Returns why Ray's memory monitor has killed a process, in a line, and the processes that it
    found."""
    message = str(error)
    reason = _between("OOM kill reason: ", "\n", message)
    used = _between("Memory on the node ", "\n", message)
    table = _between("Top 10 memory users: ", "\nRefer to", message)
    processes = f"Memory of the node {used}, and of its largest processes:\n{table}"
    cause = f"Ray's memory monitor killed it. {reason}"
    return cause, Shortage("host", processes)


def _between(before: str, after: str, text: str) -> str:
    """Returns the part of a text between two others. It is empty if the first one is not in the
    text."""
    _, _, rest = text.partition(before)
    part, _, _ = rest.partition(after)
    return part


def _num_oom_kills() -> int:
    """Returns the kernel's count of processes that it killed for want of memory, or 0 if it keeps
    none."""
    for path in _OOM_COUNTERS:
        if path.exists():
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0
