"""What is known about one call of one rank: the header it returns and the event the driver reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CallHeader:
    """What a rank sends beside its result: the result's number of rows, 0 unless it is a batch, and the method's start
    and end in `time.time()` on the worker."""

    num_rows: int
    started: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True)
class CallEvent:
    """One finished call on one rank, for the timeline."""

    pool: str
    role: str
    method: str
    rank: int
    started: float
    finished: float


OnCall = Callable[[CallEvent], None]
