"""Results of calls that may still run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from verl_like.protocol.dataproto import DataProto

T = TypeVar("T")


@dataclass(frozen=True)
class CallHeader:
    """What a rank sends beside its result.

    `num_rows` is the result's number of rows, or 0 if it is no batch. `started` and `finished` are
    the method's start and end in `time.time()` on the worker.
    """

    num_rows: int
    started: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True)
class Part:
    """One rank's result, `payload`, and its CallHeader. Both are values, or the backend's
    references to them."""

    header: Any
    payload: Any


class PendingCall(Protocol):
    """A call on the ranks of a worker group, as the backend sees it. A wait past its deadline
    raises TimeoutError."""

    def wait(self, timeout: float | None) -> list[Any]:
        """Returns the outputs of the collected ranks, in row order. `timeout` is in seconds; None
        means the group's own deadline."""

    def stream(self) -> Iterator[Any]:
        """Yields what the ranks yield while they run, as it comes. Nothing comes from a method that
        does not yield."""
        return iter(())

    def finish(self) -> None:
        """Waits until every rank has finished, at most as long as the group's deadline. The results
        may stay with the ranks."""
        self.wait(None)

    def done(self) -> bool:
        """Returns True if every rank has finished or failed."""

    def parts(self) -> list[Part]:
        """Returns references to the results of the collected ranks, in row order."""


class Future(Generic[T]):
    """The value of a call, which `collect` makes of the outputs of its ranks.

    The first `get` that does not time out keeps the value or the error.
    """

    def __init__(self, call: PendingCall, collect: Callable[[list[Any]], T]) -> None:
        self._call = call
        self.collect = collect
        self._finished = False
        self._value: T | None = None
        self._error: Exception | None = None

    def get(self, timeout: float | None = None) -> T:
        """Returns the value, after at most `timeout` seconds. Raises the call's error, or
        TimeoutError, after which `get` may be called again."""
        if not self._finished:
            try:
                self._value = self.collect(self._call.wait(timeout))
            except TimeoutError:
                raise
            except Exception as error:
                self._error = error
            self._finished = True
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def stream(self) -> Iterator[Any]:
        """Yields what the ranks yield while they run, each item once, until all ranks have ended.
        Raises what `get` raises."""
        return self._call.stream()

    def finish(self) -> None:
        """Waits until every rank has finished, without fetching the results. Raises what `get`
        raises."""
        self._call.finish()

    def done(self) -> bool:
        return self._finished or self._call.done()

    @property
    def parts(self) -> list[Part]:
        """The references to the results of the collected ranks, in row order."""
        return self._call.parts()


class DataProtoFuture(Future[DataProto]):
    """A batch whose rows are still with the ranks that make them.

    As an argument of another call its parts are sent on as references.

    `order` (B,) int64 is set where the ranks worked on the batch in another order: row i of the
    parts is row order[i] of the batch.
    """

    def __init__(
        self,
        call: PendingCall,
        collect: Callable[[list[Any]], DataProto],
        order: np.ndarray | None = None,
    ) -> None:
        def collect_in_order(outputs: list[Any]) -> DataProto:
            data = collect(outputs)
            if order is None or len(data) == 0:
                return data
            inverse = order.argsort()  # row j of the batch is row inverse[j] of the parts
            return data.select_idxs(inverse)

        super().__init__(call, collect_in_order)
        self.order = order
