"""The side of a benchmark: a process that runs functions when it is told to, one at a time, and
sends the results back.

Each contender runs in an environment of its own, so this file needs nothing but the standard
library and NumPy.
"""

import contextlib
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def serve(*functions: Callable[..., Any]) -> None:
    """Answers calls of `functions` by name until standard input ends. Each returns a dict of
    numbers, text, lists and NumPy arrays; arrays travel as files, so that a megabyte costs nothing
    to the other side's measurement.

    A function that raises ends the side; its traceback is the answer.
    """
    by_name = {function.__name__: function for function in functions}
    # What libraries print must not reach the channel of the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            call = json.loads(line)
            try:
                result = by_name[call["function"]](**call["arguments"])
                answer = {"result": {name: _packed(value) for name, value in result.items()}}
            except BaseException:
                answers.write(json.dumps({"traceback": traceback.format_exc()}) + "\n")
                raise
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _packed(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    with tempfile.NamedTemporaryFile(suffix=".npy", dir="/dev/shm", delete=False) as file:
        np.save(file, value)
    return {"npy": file.name}


def unpacked(value: Any) -> Any:
    """The inverse of what `serve` does to an array; the file is removed."""
    if not (isinstance(value, dict) and set(value) == {"npy"}):
        return value
    array = np.load(value["npy"])
    Path(value["npy"]).unlink()
    return array


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yields a list that holds, after the block, the seconds the block took."""
    seconds: list[float] = []
    started = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - started)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
