"""What is known about one call of one rank: the header it returns and the event the driver reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallHeader:
    """The small first return object of every call; `started` and `finished` are `time.time()` on the worker."""

    rows: int
    started: float = 0.0
    finished: float = 0.0
    rank: int = 0
    role: str = "driver"
    method: str = ""
    pid: int = 0
    node: str = ""


@dataclass(frozen=True)
class CallEvent:
    """One finished call on one rank, for the timeline."""

    pool: str
    role: str
    method: str
    rank: int
    started: float
    finished: float
