"""Lets a training run in a thread go on one step at a time."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Gate:
    """The run calls `wait` before a step and `finished` after it; `start` and `step` are called by
    who drives it."""

    def __init__(self) -> None:
        self._go: queue.Queue[None] = queue.Queue()
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._thread = threading.Thread()

    def wait(self) -> None:
        self._events.put(("ready", {}))
        self._go.get()

    def finished(self, metrics: dict[str, Any]) -> None:
        self._events.put(("finished", metrics))

    def start(self, body: Callable[[], Any]) -> None:
        """Runs `body` in a thread; returns when its first step may begin."""

        def run() -> None:
            body()
            self._events.put(("over", {}))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._expect("ready")

    def step(self) -> tuple[float, dict[str, Any]]:
        """Seconds and metrics of one step."""
        started = time.perf_counter()
        self._go.put(None)
        metrics = self._expect("finished")
        seconds = time.perf_counter() - started
        self._expect("ready", "over")
        return seconds, metrics

    def _expect(self, *names: str) -> dict[str, Any]:
        while True:
            try:
                name, contents = self._events.get(timeout=1)
            except queue.Empty:
                if self._thread.is_alive():
                    continue
                raise RuntimeError("the run stopped; why is above") from None
            assert name in names, (name, names)
            return contents
