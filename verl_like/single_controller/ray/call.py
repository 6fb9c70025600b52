"""Calls in flight on the Ray backend, and the record of those that were not reported as finished
yet."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from verl_like.protocol import CallHeader, Part, PendingCall
from verl_like.single_controller.failure import CallTimeout, WorkerError
from verl_like.single_controller.ray.message import fetch, unpack
from verl_like.single_controller.ray.process_handles import READY_S, ProcessHandles
from verl_like.single_controller.worker_group import LOOK_S

_POLL_S = 0.5
_log = logging.getLogger(__name__)


class UnreportedCalls:
    """The calls of a worker group that were not reported as finished yet.

    It keeps references to their headers alone, so that results are freed with the calls' futures.
    """

    def __init__(self, role: str, report: Callable[[str, int, CallHeader], None]) -> None:
        self.role = role
        self.report = report
        self._calls: dict[Any, tuple[str, int]] = {}  # header reference -> (method, rank)
        self._changing = threading.RLock()  # threads of the driver call the same group
        # Headers; a failure is raised by the wait, so it is not logged
        self.waited_for: set[Any] = set()

    def add(self, method: str, headers: Sequence[Any]) -> None:
        with self._changing:
            for rank, header in enumerate(headers):
                self._calls[header] = (method, rank)

    def wait_for(self, headers: Sequence[Any]) -> None:
        """Notes that somebody waits for these calls."""
        with self._changing:
            self.waited_for.update(headers)

    def report_finished(self, known: dict[Any, CallHeader]) -> None:
        """Reports the calls that have finished, also those whose futures nobody waits for. `known`
        headers are not fetched again."""
        with self._changing:
            for reference, header in known.items():
                self._report(reference, header)
            waiting = list(self._calls)
            finished = _finished(waiting)
            for reference in finished:
                try:
                    packed = ray.get(reference, timeout=READY_S)
                    header = unpack(packed)
                    self._report(reference, header)
                except RayError as error:
                    method, _ = self._calls.pop(reference)
                    if reference not in self.waited_for:
                        where = f"{self.role}.{method}"
                        _log.error("%s failed and nobody waited for it: %s", where, error)
            self.waited_for &= self._calls.keys()

    def _report(self, reference: Any, header: CallHeader) -> None:
        if reference in self._calls:
            method, rank = self._calls.pop(reference)
            self.report(method, rank, header)


def _finished(references: list[Any]) -> list[Any]:
    """Returns those of the references whose values are there, or whose calls have failed."""
    if not references:
        return []
    number = len(references)
    finished, _ = ray.wait(references, num_returns=number, timeout=0)
    return finished


@dataclass(eq=False)
class _CallOnRanks(PendingCall):
    """What calls in flight have in common: where they run and how long they may take."""

    answers: list[Any]
    """What Ray returned for each rank's call."""
    processes: ProcessHandles
    unreported: UnreportedCalls
    method: str
    deadline_s: float
    collect_ranks: list[int]

    @property
    def role(self) -> str:
        return self.unreported.role


@dataclass(eq=False)
class RayCall(_CallOnRanks):
    """A call in flight. Each rank's answer is two references, to its header and to its result."""

    def __post_init__(self) -> None:
        self.headers = [header for header, _ in self.answers]
        self.payloads = [payload for _, payload in self.answers]
        self.unreported.add(self.method, self.headers)

    def wait(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            timeout = self.deadline_s
        collected = [self.payloads[rank] for rank in self.collect_ranks]
        return self._wait(timeout, collected)

    def finish(self) -> None:
        self._wait(self.deadline_s, [])

    def _wait(self, timeout: float, collected: list[Any]) -> list[Any]:
        """Returns the values of the references `collected`, after every rank has finished."""
        deadline = time.monotonic() + timeout
        headers = self.headers
        processes = self.processes
        self.unreported.wait_for(headers)
        processes.wait_until_started(timeout)  # a failed start is the first thing to report
        left = deadline - time.monotonic()
        try:
            packed = processes.wait(headers, self.role, self.method, left, collected)
        except RayError as error:
            raise RuntimeError(
                f"{self.role}.{self.method} finished, but its results were lost: {error}"
            ) from error
        values = [unpack(value) for value in packed]
        num_ranks = len(headers)
        fetched = values[:num_ranks]
        known = dict(zip(headers, fetched, strict=True))
        self.unreported.report_finished(known)
        return values[num_ranks:]

    def done(self) -> bool:
        finished = _finished(self.headers)
        return len(finished) == len(self.headers)

    def parts(self) -> list[Part]:
        return [Part(self.headers[rank], self.payloads[rank]) for rank in self.collect_ranks]


@dataclass(eq=False)
class RayStream(_CallOnRanks):
    """A call in flight. Each rank's answer is a generator of references: to what the method yields,
    to its header and to its result."""

    def __post_init__(self) -> None:
        self._running = dict(enumerate(self.answers))
        self._headers: dict[int, CallHeader] = {}
        self._payloads: dict[int, Any] = {}  # references
        self._error: Exception | None = None

    def stream(self, timeout: float | None = None) -> Iterator[Any]:
        """Yields what the ranks yield, as it comes, until all have ended. Raises what `wait`
        raises."""
        if timeout is None:
            timeout = self.deadline_s
        num_ranks = len(self.answers)
        deadline = time.monotonic() + timeout
        if self._error is not None:
            raise self._error
        self.processes.wait_until_started(timeout)
        next_look = time.monotonic() + LOOK_S
        while self._running:
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                late = f"rank(s) {sorted(self._running)} of {num_ranks}"
                raise CallTimeout(self.role, self.method, timeout, late)
            if now > next_look:
                self.processes.end_stopped(self.method)
                next_look = time.monotonic() + LOOK_S
            running = list(self._running.values())
            seconds = min(_POLL_S, left)
            ready, _ = ray.wait(running, timeout=seconds)
            for rank, generator in list(self._running.items()):
                if generator in ready:
                    yield from self._next(rank)
            if not self._running:
                for rank in range(num_ranks):
                    header = self._headers[rank]
                    self.unreported.report(self.method, rank, header)

    def _next(self, rank: int) -> Iterator[Any]:
        """Yields the next thing of a rank, which is ready, if the method yielded it. Header and
        result are kept."""
        reference = next(self.answers[rank], None)
        if reference is None:
            del self._running[rank]
        elif rank in self._headers:
            self._payloads[rank] = reference
        else:
            try:
                packed = ray.get(reference, timeout=READY_S)
            except RayError:
                raise self._failure(rank, reference) from None
            value = unpack(packed)
            if isinstance(value, CallHeader):
                self._headers[rank] = value
            else:
                yield value

    def _failure(self, rank: int, reference: Any) -> Exception:
        """Returns the error of the call, of which one rank failed."""
        references = self._ends()
        references[rank] = reference
        try:
            self.processes.wait(references, self.role, self.method, READY_S)
        except WorkerError as error:
            self._error = error
        assert self._error is not None
        return self._error

    def wait(self, timeout: float | None) -> list[Any]:
        for _ in self.stream(timeout):
            pass
        collected = [self._payloads[rank] for rank in self.collect_ranks]
        return fetch(collected, READY_S)

    def finish(self) -> None:
        for _ in self.stream():
            pass

    def done(self) -> bool:
        ends = self._ends()
        finished = _finished(ends)
        return len(finished) == len(ends)

    def _ends(self) -> list[Any]:
        """Returns a reference for each rank that is ready when the rank has ended."""
        return [generator.completed() for generator in self.answers]

    def parts(self) -> list[Part]:
        """Returns the parts, which are known only when the ranks have ended. So it waits for
        them."""
        self.finish()
        return [Part(self._headers[rank], self._payloads[rank]) for rank in self.collect_ranks]
