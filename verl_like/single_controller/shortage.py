"""Memory that did not suffice: on which side, and which processes of the node hold how much."""

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

NUM_SHOWN = 12
_TITLES_OF_A_RUN = ("ray::", "VLLM::")
# Where torch raises a plain RuntimeError.
_HOST_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_DEVICE_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Shortage:
    """The memory of a node, or of a device, did not suffice. `processes` is a table, see
    `largest_processes`."""

    memory: Literal["host", "device"]
    processes: str


def shortage_of(error: BaseException) -> Shortage | None:
    """Returns what an exception says of memory, with the processes of this node as they are now, or
    None if it says nothing."""
    for each in _chain(error):
        text = str(each)
        has_device_text = any(part in text for part in _DEVICE_TEXTS)
        if isinstance(each, torch.OutOfMemoryError) or has_device_text:
            return Shortage("device", largest_processes())
        is_refused = isinstance(each, OSError) and each.errno == errno.ENOMEM
        has_host_text = any(part in text for part in _HOST_TEXTS)
        if isinstance(each, MemoryError) or is_refused or has_host_text:
            return Shortage("host", largest_processes())
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the exception, what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def largest_processes() -> str:
    """Makes a table of the processes of this node that hold most memory, and of all workers:
    resident bytes, id and title."""
    rows = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            resident = process.memory_info().rss
            title = title_of(process)
            rows.append((resident, process.pid, title))
    rows.sort(reverse=True)
    memory = psutil.virtual_memory()
    lines = [
        f"Resident memory of the largest processes, with {_gib(memory.available)} of "
        f"{_gib(memory.total)} left:"
    ]
    for place, (resident, pid, title) in enumerate(rows):
        if place < NUM_SHOWN or title.startswith(_TITLES_OF_A_RUN):
            lines.append(f"  {_gib(resident):>11}  pid {pid:<8} {title[:80]}")
    return "\n".join(lines)


def title_of(process: psutil.Process) -> str:
    """Returns the command line. That of a worker names its role, rank and method."""
    command_line = " ".join(process.cmdline())
    return command_line.strip() or process.name()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
