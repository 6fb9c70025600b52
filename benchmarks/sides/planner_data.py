"""The sequence lengths of `planner`, the same on every side."""

import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.serve import stopwatch

BUDGET = 16384
LAWS = ("log-normal", "uniform", "bimodal", "above half")


def lengths(law: str, rows: int) -> np.ndarray:
    """(rows,) int64 tokens, at most `BUDGET`."""
    draw = np.random.default_rng(rows)
    if law == "log-normal":
        return draw.lognormal(np.log(1024), 1.0, rows).astype(int).clip(16, 8192)
    if law == "uniform":
        return draw.integers(64, 8192, rows, endpoint=True)
    if law == "bimodal":
        short = draw.integers(128, 1024, rows)
        long = draw.integers(6144, 8192, rows)
        return np.where(draw.random(rows) < 0.8, short, long)
    return draw.integers(BUDGET // 2 + 1, BUDGET, rows, endpoint=True)


def timed(plan: Callable[[], Sequence[Sequence[int]]], seconds_limit: float) -> dict[str, Any]:
    """Seconds of a plan and its parts, all rows one after the other and how many each has; nothing
    after the limit."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds_limit)
    try:
        with stopwatch() as seconds:
            parts = plan()
    except TimeoutError:
        return {}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {
        "seconds": seconds[0],
        "rows": np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]),
        "sizes": np.array([len(part) for part in parts]),
    }


def _out_of_time(*_: Any) -> None:
    raise TimeoutError
