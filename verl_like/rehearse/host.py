"""The host memory of a process that is measured. Most of it is never written, so that this machine
needs less memory than is counted."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.workers import pinned_memory
from verl_like.workers.weights import shared_memory

_MAP_NORESERVE = 0x4000
"""A flag of Linux that Python's mmap does not name."""


def unwritten(num_bytes: int, dtype: Any = np.uint8) -> np.ndarray:
    """An array in memory of its own, which takes none of this machine's until it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    size = max(1, num_bytes)
    memory = mmap.mmap(-1, size, flags=flags)
    return np.frombuffer(memory, dtype=dtype)[:num_bytes]


class Unreserved:
    """Takes the place of NumPy in `pinned_memory`. The arrays that it makes take no memory until
    they are written."""

    num_bytes = 0
    """The bytes of these arrays that are not pinned."""
    num_shared_and_pinned = 0
    """The bytes of shared memory that is pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, num_bytes: int, dtype: Any) -> np.ndarray:
        Unreserved.num_bytes += num_bytes
        return unwritten(num_bytes, dtype)


def pin_unreserved(memory: np.ndarray, *, read_only: bool = False) -> None:
    """Takes the place of `pinned_memory.pin`. The memory counts as pinned from then on."""
    _pin(memory, read_only=read_only)
    Unreserved.num_bytes -= memory.nbytes


def pin_shared(memory: np.ndarray, *, read_only: bool = False) -> None:
    """Takes the place of `pinned_memory.pin` for shared memory. It goes on counting as shared."""
    _pin(memory, read_only=read_only)
    Unreserved.num_shared_and_pinned += memory.nbytes


_pin = pinned_memory.pin


def leave_unreserved() -> None:
    """Has arrays in host memory made by `Unreserved`, and all memory counted once."""
    places: Any = pinned_memory
    places.np = Unreserved()
    places.pin = pin_unreserved
    shared_memory.pin = pin_shared


_SIZES = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
"""The fields of glibc's mallinfo2, all of which have one type."""


class _MallInfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in _SIZES]


def heap_bytes() -> int:
    """The bytes that malloc has given out, written or not. So a model in host memory counts as if
    its weights had been read."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.hblkhd + info.uordblks + Unreserved.num_bytes


def pinned_bytes() -> int:
    """The bytes of pinned memory without those of shared memory."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_pinned.restype = ctypes.c_uint64
    return library.null_gpu_pinned() - Unreserved.num_shared_and_pinned


def shared_bytes() -> int:
    """The bytes of memory that other processes may map, as `weight_transport=shared_memory` has
    it."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line and "null_gpu" not in line:
            addresses, _ = line.split(maxsplit=1)
            start, end = addresses.split("-")
            total += int(end, 16) - int(start, 16)
    return total
