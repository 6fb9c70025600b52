"""The process of the GPU check: runs cases one after the other and sends what they report to the
benchmark."""

import gc
import importlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

EXPERTS = "4 layers of 30B-A3B"
"""The name of the shape of a mixture of experts."""


@dataclass(frozen=True)
class Case:
    """Some measurements that fail together."""

    name: str
    function: str
    """`module.name` of what makes the measurements: (report, device, **arguments)."""
    seconds: float
    """Longest it may take on a GPU."""
    arguments: dict[str, Any] = field(default_factory=dict)


class Sent:
    """Has the methods of the benchmark's report; each call is sent over the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments, **named: self._connection.send((method, arguments, named))


def run_cases(cases: Sequence[Case], device: str, connection: Connection, log: str) -> None:
    """Runs the cases up to the first that fails: after it the device may be in any state, so the
    process ends."""
    if device == "cuda":
        # As workers have it. torch reads it when it first takes memory of the GPU.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sent = Sent(connection)
    for case in cases:
        print(f"\n{time.strftime('%H:%M:%S')} {case.name}", flush=True)
        module, _, name = case.function.rpartition(".")
        try:
            getattr(importlib.import_module(module), name)(sent, device, **case.arguments)
        except Exception as error:
            traceback.print_exc()
            connection.send(
                ("case_failed", (f"{type(error).__name__}: {error}".splitlines()[0][:200],), {})
            )
            return
        connection.send(("case_done", (), {}))
        gc.collect()  # models are in reference cycles
    connection.close()


def seconds_of(
    device: str, function: Callable[[], Any], *, rounds: int = 5, warm_up: int = 2
) -> list[float]:
    """Wall-clock seconds of each round, the device's work included."""
    import torch

    seconds = []
    for _ in range(warm_up + rounds):
        started = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[warm_up:]
