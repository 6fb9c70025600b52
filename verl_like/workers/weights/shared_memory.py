"""Weights in memory that the processes of a node share: the trainer writes them once, and the
engines map its pages."""

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
from verl_like.workers.weights.arrival import StaleWeightsError, WeightSyncError
from verl_like.workers.weights.exports import WeightExport, buckets_of
from verl_like.workers.weights.transport import WeightTransport


@dataclass(frozen=True)
class SharedPages:
    """The address of memory that another process of this node owns. NumPy reads it as a (nbytes,)
    uint8 array.

    Only the address travels. A process maps the memory, read-only, when it first uses the address.
    Each use holds a lock, which keeps the owner from writing, until the last array of that use is
    gone or the process has ended in whatever way.
    """

    path: str
    """Path of the owner's file descriptor."""
    name: str
    """Name of the memory, which no other memory has."""
    nbytes: int

    def __reduce__(self) -> Any:
        return SharedPages, (self.path, self.name, self.nbytes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array

    def _is_there(self) -> bool:
        """Returns whether the owner still has the memory."""
        try:
            return os.readlink(self.path) == self.name
        except OSError:  # the owner has ended or closed it
            return False

    def held(self) -> "SharedPages":
        """Returns an address of the same memory in this process.

        While the result exists the memory is locked, and it is there without its owner.
        """
        locked = self._lock()
        pages = replace(self, path=f"/proc/{os.getpid()}/fd/{locked.fileno()}")
        weakref.finalize(pages, locked.close)
        return pages

    def _lock(self) -> io.FileIO:
        """Opens the memory, and locks it until the file is closed.

        Raises WeightSyncError if it is gone, and StaleWeightsError if its owner writes into it.
        """
        try:
            locked = io.FileIO(self.path)
        except OSError:
            raise self._is_gone() from None
        # An open file stays the same, while the path may lead to another file by now.
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
        """Returns the error for memory that is not there."""
        return WeightSyncError(
            f"The weights are in memory of another process, {self.path}, which ended or is not on "
            "this node; use actor_rollout_ref.rollout.weight_transport=gloo or object_store "
            "between nodes."
        )

    @cached_property
    def _array(self) -> np.ndarray:
        """A view of the mapped memory, which is locked as long as the view exists."""
        locked = self._lock()
        if self not in _mapped:
            for pages in list(_mapped):
                if not pages._is_there():
                    del _mapped[pages]
            # The file is opened again: the mapping keeps it open, but must not keep the lock.
            with open(f"/proc/self/fd/{locked.fileno()}", "rb") as file:
                memory = mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ)
            whole = np.frombuffer(memory, dtype=np.uint8)
            _mapped[replace(self)] = _Mapping(whole)
        array = _mapped[self].array.view()
        weakref.finalize(array, locked.close)
        return array


@dataclass
class _Mapping:
    """Memory of another process that is mapped in this one."""

    array: np.ndarray
    was_pinned: bool = False
    """True if CUDA was asked to pin it."""


_mapped: dict[SharedPages, _Mapping] = {}
"""What this process has mapped. It is kept while the owner has the memory, since mapping it again
takes as long as copying it."""


def pin_pages(exports: Sequence[WeightExport]) -> None:
    """Maps the shared memory of the exports in this process and pins it for copies to its GPU.

    It stays pinned as long as it is mapped. Memory that is gone or written anew is no error here:
    the check of the weights finds it, and there all ranks agree on it. If the driver does not pin
    memory that this process may only read, a warning says so.
    """
    for bucket in buckets_of(exports):
        pages = bucket.data
        if isinstance(pages, SharedPages):
            with contextlib.suppress(WeightSyncError):
                np.asarray(pages)  # maps them
                _pin_once(_mapped[pages])


def _pin_once(mapping: _Mapping) -> None:
    """Pins mapped memory, unless that was tried before. A driver that refuses is a warning."""
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
    """Memory that this process writes and others map. It is in no file system, so that a killed
    process leaves none behind."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.descriptor = os.memfd_create(f"verl_like-weights-{uuid.uuid4().hex}")
        os.ftruncate(self.descriptor, num_bytes)
        memory = mmap.mmap(self.descriptor, num_bytes)
        self.array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(self, os.close, self.descriptor)
        if pinned:
            pin(self.array)

    @property
    def address(self) -> SharedPages:
        """A new object each time, since an address keeps the array of who used it."""
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        name = os.readlink(path)
        return SharedPages(path, name, self.array.nbytes)

    def lock(self) -> bool:
        """Returns whether nobody reads the memory; then nobody can until `unlock`."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


class SharedMemoryTransport(WeightTransport):
    """The trainer writes the weights into memory that all processes of its node map; only the
    address travels.

    Memory of the latest weights and memory that somebody reads is left alone. Other memory, which
    has earlier versions, is written again. So there are mostly two versions of the weights on a
    node.
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._latest: list[_Segment] = []
        """Segments with the weights that were published last."""
        self._written: list[_Segment] = []
        """Segments that were allocated since."""

    def allocate(self, num_bytes: int, pinned: bool) -> np.ndarray:
        segment = self._free_segment(num_bytes)
        if segment is None:
            segment = _Segment(num_bytes, pinned=pinned)
            segment.lock()
            self._segments.append(segment)
        self._written.append(segment)
        return segment.array

    def _free_segment(self, num_bytes: int) -> _Segment | None:
        """Returns a segment of this size that may be written again, locked; None if there is
        none."""
        taken = {*self._latest, *self._written}
        for segment in self._segments:
            fits = segment.array.nbytes == num_bytes
            if fits and segment not in taken and segment.lock():
                return segment
        return None

    def publish(self, export: WeightExport) -> WeightExport:
        arrays = [bucket.data for bucket in export.buckets]
        pages = self._hand_out(arrays)
        self._keep_written()
        return with_data(export, pages)

    def _hand_out(self, arrays: Sequence[np.ndarray]) -> list[SharedPages]:
        """Returns the addresses of arrays of `allocate`, which others can map from here on."""
        addresses = {}
        for segment in self._written:
            segment.unlock()
            addresses[id(segment.array)] = segment.address
        return [addresses[id(array)] for array in arrays]

    def _keep_written(self) -> None:
        """Makes the segments that were written the latest ones."""
        self._latest = self._written
        self._written = []


def with_data(export: WeightExport, data: Sequence[np.ndarray | SharedPages]) -> WeightExport:
    """Returns the export with other places of its buckets' values."""
    buckets = []
    for bucket, own_data in zip(export.buckets, data, strict=True):
        buckets.append(replace(bucket, data=own_data))
    return replace(export, buckets=tuple(buckets))
