"""A call of a method that yields, on the Ray backend."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from verl_like.protocol import Part
from verl_like.single_controller.call import CallHeader
from verl_like.single_controller.failure import CallTimeout, WorkerDied, WorkerError
from verl_like.single_controller.ray.process_handles import READY_S
from verl_like.single_controller.ray.worker_process import fetch

if TYPE_CHECKING:
    from verl_like.single_controller.ray.worker_group import RayWorkerGroup

_POLL_S = 0.5


class RayStream:
    """A call in flight, with a generator of references per rank: what the method yields, its header, its result."""

    def __init__(self, group: RayWorkerGroup, method: str, generators: list[Any], collect_ranks: list[int]) -> None:
        self.group, self.method, self.generators, self.collect_ranks = group, method, generators, collect_ranks
        self._running = dict(enumerate(generators))
        self._headers: dict[int, CallHeader] = {}
        self._payloads: dict[int, Any] = {}  # references
        self._error: Exception | None = None

    def stream(self, timeout: float | None = None) -> Iterator[Any]:
        """What the ranks yield, as it comes, until all have ended. Raises what `wait` raises."""
        group = self.group
        timeout = group.deadline_s if timeout is None else timeout
        deadline = time.monotonic() + timeout
        if self._error is not None:
            raise self._error
        group.processes.wait_until_started(timeout)
        while self._running:
            left = deadline - time.monotonic()
            if left <= 0:
                late = f"rank(s) {sorted(self._running)} of {len(self.generators)}"
                raise CallTimeout(group.role, self.method, timeout, late)
            ready, _ = ray.wait(list(self._running.values()), timeout=min(_POLL_S, left))
            for rank in [rank for rank, generator in self._running.items() if generator in ready]:
                yield from self._next(rank)
                if not self._running:
                    group.report([self._headers[rank] for rank in range(len(self.generators))])

    def _next(self, rank: int) -> Iterator[Any]:
        """The next thing of a rank, which is ready, if the method yielded it; header and result are kept."""
        reference = next(self.generators[rank], None)
        if reference is None:
            del self._running[rank]
        elif rank in self._headers:
            self._payloads[rank] = reference
        else:
            try:
                value = ray.get(reference, timeout=READY_S)
            except RayError:
                raise self._failure(rank, reference) from None
            if isinstance(value, CallHeader):
                self._headers[rank] = value
            else:
                yield value

    def _failure(self, rank: int, reference: Any) -> Exception:
        """What became of the call, of which one rank failed."""
        references = [generator.completed() for generator in self.generators]
        references[rank] = reference
        try:
            self.group.processes.wait(references, self.group.role, self.method, READY_S)
        except (WorkerError, WorkerDied) as error:
            self._error = error
        assert self._error is not None
        return self._error

    def wait(self, timeout: float | None) -> list[Any]:
        for _ in self.stream(timeout):
            pass
        outputs: list[Any] = [None] * len(self.generators)
        collected = fetch([self._payloads[rank] for rank in self.collect_ranks], READY_S)
        for rank, output in zip(self.collect_ranks, collected, strict=True):
            outputs[rank] = output
        return outputs

    def done(self) -> bool:
        ends = [generator.completed() for generator in self.generators]
        return len(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) == len(ends)

    def parts(self) -> list[Part]:
        """Known only when the ranks have ended, so this waits for them."""
        for _ in self.stream():
            pass
        return [Part(self._headers[rank], self._payloads[rank]) for rank in self.collect_ranks]

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        return fetch(references, self.group.deadline_s if timeout is None else timeout)
