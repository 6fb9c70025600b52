"""Environments and harnesses that go wrong in every way, and a look at the processes that run them."""

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from verl_like.rewards.supervisor import descendants
from verl_like.workers.agents.hosts import HostedCode, Hosts, Seat

AGENT_FILE = '''
import asyncio, ctypes, os, subprocess, sys, threading, time

num_constructed = 0
meeting = threading.Barrier(40)
num_waiting = 0

def inner(number):
    return 1 / number

class Game:
    def __init__(self):
        global num_constructed
        num_constructed += 1
        self.number = num_constructed

    def reset(self, start=None, **row):
        self.points = start or 0
        return None if start is None else f"starts at {start} with {sorted(row)}"

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: how much
        """
        self.points += number
        return self.points

    async def add_later(self, number: int) -> int:
        """Adds a little later.

        Args:
            number: how much
        """
        await asyncio.sleep(0.001)
        return self.add(number)

    def get_reward(self):
        return self.points / 8

    def give(self, what):
        import numpy as np
        return {"pair": (1, 2), "none": None, "half": "a \\ud800 b", "long": "x" * (1 << 20),
                "float": np.float32(0.5), "number": self.number, "pid": os.getpid(),
                "loaded": [m for m in ("torch", "transformers", "pydantic", "numpy.ma", "ray") if m in sys.modules]}[what]

    def meet(self):
        meeting.wait(60)

    async def meet_later(self):
        global num_waiting
        num_waiting += 1
        while num_waiting < 40: await asyncio.sleep(0.001)

    def divide(self, by):
        return inner(by)

    def fail(self, how):
        if how == "leave": sys.exit("bye")
        if how == "long": raise ValueError("y" * 50_000_000)
        if how == "half": raise ValueError("a \\ud800 b")
        if how == "unavailable":
            from verl_like.workers.agents.host_process import Unavailable
            raise Unavailable("the database is down")

    async def fail_later(self):
        raise SystemExit(3)

    def sleep(self, seconds):
        time.sleep(seconds)

    async def sleep_later(self, seconds):
        await asyncio.sleep(seconds)

    async def sleep_on(self, file):
        while True:
            try: await asyncio.sleep(600)
            except asyncio.CancelledError: open(file, "w").write("cancelled")

    def hold(self):
        ctypes.PyDLL(None).sleep(600)  # no other thread runs meanwhile

    def exit(self, code):
        os._exit(code)

    def eat(self):
        blocks = []
        while True: blocks.append(b"x" * (1 << 26))

    def start(self, file):
        program = "import os, sys, time; os.fork() and os._exit(0); open(sys.argv[1], 'w').write(str(os.getpid()))"
        program += "; time.sleep(600)"
        subprocess.run([sys.executable, "-c", program, file], start_new_session=True, env={}, timeout=60)
        while not os.path.exists(file) or not open(file).read(): time.sleep(0.01)

    def write(self, content):
        import gc
        (ours,) = [each._connection for each in gc.get_objects() if type(each).__name__ == "_Host"]
        ours.sendall(content.encode())
        time.sleep(600)

class Odd:
    def reset(self): return {"no": "text"}
    def get_reward(self): return {"score": {1}}

class NumPy:
    def reset(self): pass
    def get_reward(self):
        import numpy as np
        return np.float32(0.25)

class NotANumber:
    def reset(self): pass
    def get_reward(self): return float("nan")

async def run(row, base_url, api_key):
    await asyncio.sleep(0.001)
    return row["points"] if base_url.endswith(api_key) else None
'''
"""A module of a user."""


MODULE = "agent_code_of_a_test"


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine as a function."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


@contextlib.asynccontextmanager
async def hosts_of(
    name: str = "Game",
    kind: Any = "environment",
    num_processes: int = 1,
    max_memory_gb: float = 2.0,
) -> AsyncIterator[Hosts]:
    """Host processes of the class or function `name` of the module."""
    hosts = Hosts(HostedCode(kind, f"{MODULE}:{name}"), num_processes, max_memory_gb)
    try:
        await hosts.start()
        yield hosts
    finally:
        await hosts.close()


async def pid_of(seat: Seat) -> int:
    return int(await seat.call("give", {"what": "pid"}, 60.0))


def supervisor_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("PPid:")[1].split()[0])


def below() -> set[int]:
    """The processes below this one."""
    return set(descendants(os.getpid()))
