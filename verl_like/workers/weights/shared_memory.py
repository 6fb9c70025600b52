"""Weights in memory that the processes of a node share: the trainer writes them once, the engines
map its pages."""

import contextlib
import fcntl
import io
import mmap
import os
import uuid
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_like.workers.pinned_memory import pin
from verl_like.workers.weights.exports import StaleWeightsError, WeightExport, WeightSyncError
from verl_like.workers.weights.transport import WeightTransport


@dataclass(frozen=True)
class SharedPages:
    """The address of memory that another process of this node owns; NumPy takes it for a (nbytes,)
    uint8 array.

    Only the address travels. The memory is mapped, read-only, at the first use by a process, and
    from each use locked against its owner until the last array on it is gone, or the process,
    however it ended.
    """

    path: str
    """Where the owner's descriptor is."""
    name: str
    """Of the memory, which no other has."""
    nbytes: int

    def __reduce__(self) -> Any:
        return SharedPages, (self.path, self.name, self.nbytes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array

    def _is_there(self) -> bool:
        try:
            return os.readlink(self.path) == self.name
        except OSError:  # its owner has ended or closed it
            return False

    def held(self) -> "SharedPages":
        """By an address in this process, for as long as the result is there: locked, and there
        without the owner."""
        locked = self._lock()
        pages = replace(self, path=f"/proc/{os.getpid()}/fd/{locked.fileno()}")
        weakref.finalize(pages, locked.close)
        return pages

    def _lock(self) -> io.FileIO:
        try:
            locked = io.FileIO(self.path)
        except OSError:
            raise self._is_gone() from None
        # What is open stays what it is, while another file may be at the path by now.
        if os.readlink(f"/proc/self/fd/{locked.fileno()}") != self.name:
            locked.close()
            raise self._is_gone()
        try:
            fcntl.flock(locked, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StaleWeightsError(
                f"Newer weights are being written into {self.path}; load those."
            ) from None
        return locked

    def _is_gone(self) -> WeightSyncError:
        return WeightSyncError(
            f"The weights are in memory of another process, {self.path}, which ended or is not on "
            "this node; use actor_rollout_ref.rollout.weight_transport=gloo or object_store "
            "between nodes."
        )

    @cached_property
    def _array(self) -> np.ndarray:
        locked = self._lock()
        if self not in _mapped:
            for pages in [pages for pages in _mapped if not pages._is_there()]:
                del _mapped[pages]
            # Without the lock, which goes with the array
            with open(f"/proc/self/fd/{locked.fileno()}", "rb") as file:
                memory = mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ)
            _mapped[replace(self)] = _Mapping(np.frombuffer(memory, dtype=np.uint8))
        array = _mapped[self].array.view()
        weakref.finalize(array, locked.close)
        return array


@dataclass
class _Mapping:
    """Memory of another process, mapped in this one."""

    array: np.ndarray
    was_pinned: bool = False
    """Whether CUDA was asked to pin it."""


_mapped: dict[SharedPages, _Mapping] = {}
"""What this process has mapped, while its owner has it: to find its pages again takes as long as to
copy them."""


def pin_pages(exports: Sequence[WeightExport]) -> None:
    """Maps the shared memory of the exports in this process, and pins it there for copies to its
    GPU.

    It stays pinned as long as it is mapped. Memory that is gone or written anew is left to the
    check of the weights, in which all ranks agree on it. A driver that does not pin what this
    process may only read is named by a warning.
    """
    for pages in [bucket.data for export in exports for bucket in export.buckets]:
        if isinstance(pages, SharedPages):
            with contextlib.suppress(WeightSyncError):
                np.asarray(pages)  # maps them
                _pin_once(_mapped[pages])


def _pin_once(mapping: _Mapping) -> None:
    if mapping.was_pinned:
        return
    mapping.was_pinned = True
    try:
        pin(mapping.array, read_only=True)
    except torch.cuda.CudaError as error:
        warnings.warn(
            f"The driver does not pin shared weights ({error}): they are copied slowly.",
            stacklevel=2,
        )


class _Segment:
    """Memory that this process writes and others map. No file system knows it, so none is left
    behind by a kill."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.descriptor = os.memfd_create(f"verl_like-weights-{uuid.uuid4().hex}")
        os.ftruncate(self.descriptor, num_bytes)
        self.array = np.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=np.uint8)
        weakref.finalize(self, os.close, self.descriptor)
        if pinned:
            pin(self.array)

    @property
    def address(self) -> SharedPages:
        """Another object each time, since whoever uses it maps the memory with it."""
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return SharedPages(path, os.readlink(path), self.array.nbytes)

    def lock(self) -> bool:
        """Whether nobody reads it; nobody then can until `unlock`."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


class SharedMemoryTransport(WeightTransport):
    """The trainer writes the weights into memory that all processes of its node map; only its
    address travels.

    The memory of the latest weights is left alone, and so is what anybody has mapped; other memory,
    of the versions before, is written again. So there are mostly two versions of the weights on a
    node.
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._latest: list[_Segment] = []
        self._written: list[_Segment] = []

    def allocate(self, num_bytes: int, pinned: bool) -> np.ndarray:
        taken = {*self._latest, *self._written}
        fitting = (
            each for each in self._segments if each.array.nbytes == num_bytes and each not in taken
        )
        segment = next((each for each in fitting if each.lock()), None)
        if segment is None:
            segment = _Segment(num_bytes, pinned=pinned)
            segment.lock()
            self._segments.append(segment)
        self._written.append(segment)
        return segment.array

    def publish(self, export: WeightExport) -> WeightExport:
        pages = self._hand_out([bucket.data for bucket in export.buckets])
        self._latest = self._written
        self._written = []
        return with_data(export, pages)

    def _hand_out(self, arrays: Sequence[np.ndarray]) -> list[SharedPages]:
        """The addresses of memory of `allocate`, which others can map from here on."""
        for segment in self._written:
            segment.unlock()
        addresses = {id(segment.array): segment.address for segment in self._written}
        return [addresses[id(array)] for array in arrays]


def with_data(export: WeightExport, data: Sequence[np.ndarray | SharedPages]) -> WeightExport:
    """The export with its buckets' values elsewhere."""
    buckets = zip(export.buckets, data, strict=True)
    return replace(export, buckets=tuple(replace(bucket, data=each) for bucket, each in buckets))
