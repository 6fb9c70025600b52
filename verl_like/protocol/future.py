"""Results of calls that may not have finished: a list of per-rank references, fetched only where rows are needed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from verl_like.protocol.dataproto import DataProto

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One rank's result as references of the backend.

    `header` resolves to a small object whose `.num_rows` is the number of rows of the payload; `payload` to the
    DataProto.
    """

    header: Any
    payload: Any


class PendingCall(Protocol):
    """A call on the ranks of a worker group, as the backend sees it. Waiting past a deadline raises TimeoutError."""

    def wait(self, timeout: float | None) -> list[Any]:
        """Outputs of the collected ranks, in row order; `timeout` in seconds, None = the group's own deadline."""

    def stream(self) -> Iterator[Any]:
        """What the ranks yield while they run, as it comes; empty for a method that does not yield."""
        return iter(())

    def done(self) -> bool:
        """Whether every rank has finished or failed."""

    def parts(self) -> list[Part]:
        """References to the results of the collected ranks, in row order."""

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """What headers or payloads of `parts()` resolve to, in order."""


class Future(Generic[T]):
    """The value of a call: `collect` of the outputs of its ranks. Value or error is kept after the first `get`."""

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

    `order` (B,) int64 is set where the ranks worked on the batch in another order: row i of the parts is row order[i]
    of the batch.
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
        return [DataProtoFuture(call, DataProto.concat) for call in calls]

    @staticmethod
    def concat(futures: Sequence["DataProtoFuture"]) -> "DataProtoFuture":
        """The rows of all futures, in order. Raises ValueError for an empty list."""
        if not futures:
            raise ValueError("DataProtoFuture.concat got an empty list; there is no batch to return.")
        return DataProtoFuture(_ConcatCall(list(futures)), DataProto.concat)


def gather_rows(sizes: Sequence[int], rows: np.ndarray, fetch: Callable[[Sequence[int]], list[DataProto]]) -> DataProto:
    """The rows of these numbers, in that order, of the batch that several parts of `sizes` rows make up.

    `fetch` gives the parts of the numbers it is asked for, which are those that hold the rows; without any row it is
    the first one, for its columns. Contiguous rows of one part are a view, others are copied once.
    """
    if len(rows) == 0:
        return fetch([0])[0].slice(0, 0)
    starts = np.cumsum([0, *sizes])
    owner = np.searchsorted(starts[1:], rows, side="right")
    needed = np.unique(owner).tolist()
    taken, order = [], []
    for part, payload in zip(needed, fetch(needed), strict=True):
        (mine,) = np.nonzero(owner == part)
        numbers = rows[mine] - starts[part]
        is_range = _is_range(numbers)
        taken.append(payload.rows(int(numbers[0]), int(numbers[-1]) + 1) if is_range else payload.select_idxs(numbers))
        order.append(mine)
    if len(taken) == 1:
        return taken[0]
    whole_order = np.concatenate(order)
    return DataProto.concat(taken, None if _is_range(whole_order) else torch.from_numpy(whole_order))


def _is_range(numbers: np.ndarray) -> bool:
    return bool((np.diff(numbers) == 1).all())


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class _ChunkCall(PendingCall):
    """Rows index/count of the whole result of `call`."""

    def __init__(self, call: PendingCall, index: int, count: int) -> None:
        self.call, self.index, self.count = call, index, count

    def wait(self, timeout: float | None) -> list[DataProto]:
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = self.call.parts()
        sizes = [header.num_rows for header in self.fetch([part.header for part in parts], timeout)]
        total = sum(sizes)
        if total % self.count:
            raise ValueError(f"chunk: {total} rows do not divide into {self.count} equal chunks; pad the batch first.")
        num_rows = total // self.count
        rows = np.arange(self.index * num_rows, (self.index + 1) * num_rows)
        return [
            gather_rows(sizes, rows, lambda needed: self.fetch([parts[i].payload for i in needed], _left(deadline)))
        ]

    def done(self) -> bool:
        return self.call.done()

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        return self.call.fetch(references, timeout)

    def parts(self) -> list[Part]:
        raise ValueError("A chunk of a future cannot be handed on by reference; pass the whole future, or chunk.get().")


class _ConcatCall(PendingCall):
    """The results of several futures of one backend, one after the other."""

    def __init__(self, futures: list[DataProtoFuture]) -> None:
        self.futures = futures

    def wait(self, timeout: float | None) -> list[DataProto]:
        deadline = None if timeout is None else time.monotonic() + timeout
        return [future.get(_left(deadline)) for future in self.futures]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def parts(self) -> list[Part]:
        if any(future.order is not None for future in self.futures):
            raise ValueError("concat: the ranks hold the rows of a future in another order than its batch; use get().")
        return [part for future in self.futures for part in future.parts]

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        return self.futures[0]._call.fetch(references, timeout)
