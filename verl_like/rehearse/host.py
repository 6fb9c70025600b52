"""The host memory of a measuring process, of which this machine may have less: nobody writes most
of it."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.workers import pinned_memory
from verl_like.workers.weights import shared_memory

_MAP_NORESERVE = 0x4000
"""Of Linux; Python's mmap does not name it."""


def unwritten(num_bytes: int, dtype: Any = np.uint8) -> np.ndarray:
    """Memory that takes none of the machine's before it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, max(1, num_bytes), flags=flags), dtype=dtype)[:num_bytes]


class Unreserved:
    """In the place of NumPy where `pinned_memory` makes places in host memory."""

    num_bytes = 0
    """Of the places that are not pinned."""
    num_shared_and_pinned = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, num_bytes: int, dtype: Any) -> np.ndarray:
        Unreserved.num_bytes += num_bytes
        return unwritten(num_bytes, dtype)


def pin_unreserved(memory: np.ndarray, *, read_only: bool = False) -> None:
    """As `pinned_memory.pin`, from where on the memory counts as pinned."""
    _pin(memory, read_only=read_only)
    Unreserved.num_bytes -= memory.nbytes


def pin_shared(memory: np.ndarray, *, read_only: bool = False) -> None:
    """As `pinned_memory.pin`, of memory that goes on counting as shared."""
    _pin(memory, read_only=read_only)
    Unreserved.num_shared_and_pinned += memory.nbytes


_pin = pinned_memory.pin


def leave_unreserved() -> None:
    """Has places in host memory made without the memory, and each counted once."""
    places: Any = pinned_memory
    shared: Any = shared_memory
    places.np = Unreserved()
    places.pin = pin_unreserved
    shared.pin = pin_shared


class _MallInfo(ctypes.Structure):
    """glibc's mallinfo2, of ten sizes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *(
            (name, ctypes.c_size_t)
            for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        ),
    ]


def heap_bytes() -> int:
    """What malloc has given out, also where nobody has written: a model in host memory counts as
    one that was read."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.hblkhd + info.uordblks + Unreserved.num_bytes


def pinned_bytes() -> int:
    """What CUDA has given out or was shown, without shared memory."""
    counted = ctypes.CDLL(os.environ["LD_PRELOAD"]).null_gpu_pinned
    counted.restype = ctypes.c_uint64
    return counted() - Unreserved.num_shared_and_pinned


def shared_bytes() -> int:
    """Memory without a name that other processes may map, as `weight_transport=shared_memory` has
    it."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line and "null_gpu" not in line:
            start, end = line.split(maxsplit=1)[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total
