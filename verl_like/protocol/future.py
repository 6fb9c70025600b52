"""Results of calls that may not have finished: a list of per-rank references, fetched only where rows are needed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from verl_like.protocol.dataproto import DataProto

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One rank's result as references of the backend.

    `header` resolves to a small object whose `.rows` is the number of rows of the payload; `payload` to the DataProto.
    """

    header: Any
    payload: Any


class PendingCall(Protocol):
    """A call on the ranks of a worker group, as the backend sees it. Waiting past a deadline raises TimeoutError."""

    def wait(self, timeout: float | None) -> list[Any]:
        """Outputs of all ranks, in rank order; `timeout` in seconds, None = the group's own deadline."""

    def stream(self) -> Iterator[Any]:
        """What the ranks yield while they run, as it comes; empty for a method that does not yield."""

    def done(self) -> bool:
        """Whether every rank has finished or failed."""

    def parts(self) -> list[Part]:
        """References to the results of the collected ranks, in row order."""

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """What headers or payloads of `parts()` resolve to, in order."""


class Future(Generic[T]):
    """The value of a call: `collect` of the outputs of all ranks. Value or error is kept after the first `get`."""

    def __init__(self, call: PendingCall, collect: Callable[[list[Any]], T]) -> None:
        self._call = call
        self._collect = collect
        self._finished = False
        self._value: T | None = None
        self._error: Exception | None = None

    def get(self, timeout: float | None = None) -> T:
        """The value, after at most `timeout` seconds. Raises the call's error, or TimeoutError; then `get` may be
        called again."""
        if not self._finished:
            try:
                self._value = self._collect(self._call.wait(timeout))
            except TimeoutError:
                raise
            except Exception as error:
                self._error = error
            self._finished = True
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def stream(self) -> Iterator[Any]:
        """What the ranks yield while they run, as it comes, until all have ended; `get` then has their results. Raises
        what `get` raises. Nothing comes twice."""
        return self._call.stream()

    def done(self) -> bool:
        return self._finished or self._call.done()


class DataProtoFuture(Future[DataProto]):
    """A batch whose rows are still with the ranks that make them. Handed to another group it forwards `parts`.

    `order` (rows,) int64 is set where the ranks worked on the batch in another order: row i of the parts is row
    order[i] of the batch.
    """

    def __init__(
        self, call: PendingCall, collect: Callable[[list[Any]], DataProto], order: np.ndarray | None = None
    ) -> None:
        super().__init__(call, collect)
        self.order = order

    @property
    def parts(self) -> list[Part]:
        """References to the results of the collected ranks, in row order. Raises ValueError on a chunk, whose rows are
        not whole parts."""
        return self._call.parts()

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Split into equal row ranges. Nothing is fetched here; `get` of a chunk fetches the parts that overlap it, and
        raises ValueError if the rows do not divide, as DataProto.chunk does."""
        if chunks <= 0:
            raise ValueError(f"chunk: the number of chunks must be positive, got {chunks}.")
        if self.order is not None:
            raise ValueError("chunk: the ranks hold these rows in another order than the batch; chunk future.get().")
        whole = self._call if isinstance(self._call, _ChunkCall) else _ChunkCall(self._call, 0, 1)
        first, count = whole.index * chunks, whole.count * chunks
        calls = [_ChunkCall(whole.call, first + offset, count) for offset in range(chunks)]
        return [DataProtoFuture(call, _only) for call in calls]

    @staticmethod
    def concat(futures: Sequence["DataProtoFuture"]) -> "DataProtoFuture":
        """The rows of all futures, in order. Raises ValueError for an empty list."""
        if not futures:
            raise ValueError("DataProtoFuture.concat got an empty list; there is no batch to return.")
        return DataProtoFuture(_ConcatCall(list(futures)), DataProto.concat)


def _only(outputs: list[DataProto]) -> DataProto:
    (output,) = outputs
    return output


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class _ChunkCall:
    """Rows index/count of the whole result of `call`."""

    def __init__(self, call: PendingCall, index: int, count: int) -> None:
        self.call, self.index, self.count = call, index, count

    def wait(self, timeout: float | None) -> list[DataProto]:
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = self.call.parts()
        part_rows = [header.rows for header in self.call.fetch([part.header for part in parts], timeout)]
        rows = sum(part_rows)
        if rows % self.count:
            raise ValueError(f"chunk: {rows} rows do not divide into {self.count} equal chunks; pad the batch first.")
        start = self.index * (rows // self.count)
        stop = start + rows // self.count
        wanted, ranges, first = [], [], 0
        for part, size in zip(parts, part_rows, strict=True):
            begin, end = max(start, first) - first, min(stop, first + size) - first
            if begin < end:
                wanted.append(part.payload)
                ranges.append((begin, end))
            first += size
        if not wanted:  # no rows at all: an empty slice still has the columns
            wanted, ranges = [parts[0].payload], [(0, 0)]
        payloads = self.call.fetch(wanted, _left(deadline))
        return [DataProto.concat([data.rows(*span) for data, span in zip(payloads, ranges, strict=True)])]

    def stream(self) -> Iterator[Any]:
        return iter(())

    def done(self) -> bool:
        return self.call.done()

    def parts(self) -> list[Part]:
        raise ValueError("A chunk of a future cannot be handed on by reference; pass the whole future, or chunk.get().")

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        return self.call.fetch(references, timeout)


class _ConcatCall:
    """The results of several futures of one backend, one after the other."""

    def __init__(self, futures: list[DataProtoFuture]) -> None:
        self.futures = futures

    def wait(self, timeout: float | None) -> list[DataProto]:
        deadline = None if timeout is None else time.monotonic() + timeout
        return [future.get(_left(deadline)) for future in self.futures]

    def stream(self) -> Iterator[Any]:
        return iter(())

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def parts(self) -> list[Part]:
        if any(future.order is not None for future in self.futures):
            raise ValueError("concat: the ranks hold the rows of a future in another order than its batch; use get().")
        return [part for future in self.futures for part in future.parts]

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        return self.futures[0]._call.fetch(references, timeout)
