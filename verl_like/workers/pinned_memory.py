"""Pinned host memory, to and from which a GPU copies at full speed."""

import contextlib
import weakref
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64
"""The alignment of tensors in one piece of memory, in bytes: a multiple of any element's size."""
Name = TypeVar("Name")
Tensors = Mapping[Name, Tensor]
_READ_ONLY = 0x08
"""CUDA's flag cudaHostRegisterReadOnly."""


def pin(memory: np.ndarray, *, read_only: bool = False) -> None:
    """Pins the memory of an array until the array is freed.

    `read_only` says that this process may not write the memory; not every driver pins such memory.
    Raises torch.cuda.CudaError if CUDA refuses.

    The registration ends before the memory is freed. If an address remained registered, CUDA would
    refuse to pin a later allocation there with "resource already mapped".
    """
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    flags = _READ_ONLY if read_only else 0
    result = runtime.cudaHostRegister(address, memory.nbytes, flags)
    try:
        torch.cuda.check_error(result)
    except torch.cuda.CudaError:
        _forget_last_error()
        raise
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the driver does it when the process ends


def _forget_last_error() -> None:
    """Launches a kernel that reads the last error of CUDA, so that no later kernel fails with it.

    CUDA keeps the error of a call until it is read.
    """
    with contextlib.suppress(torch.AcceleratorError):
        torch.zeros(1, device="cuda")


def to_device(tensors: Tensors[Name], device: str) -> dict[Name, Tensor]:
    """Returns copies on a device of tensors of the host, by the same names.

    All tensors go to a GPU in one copy, for which this does not wait. The tensors themselves are
    returned if the device is the CPU.
    """
    if device == "cpu":
        return dict(tensors)
    is_gpu = device.startswith("cuda")
    num_bytes = _padded_size(tensors)
    staged = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    for name, place in _views(staged, tensors).items():
        place.copy_(tensors[name])
    # torch keeps pinned memory until the copy is done, also after `staged` is gone.
    moved = staged.to(device, non_blocking=True)
    return _views(moved, tensors)


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy of a GPU's tensor in pinned host memory, or a tensor of the host itself.

    The former waits for all work that the GPU has to do before.
    """
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copy


def host_places(tensors: Tensors[Name]) -> dict[Name, Tensor]:
    """Returns uninitialised host memory for each tensor, with its shape and dtype, by its name.

    The memory is pinned if any tensor is on a GPU. It is one NumPy array, because that has large
    pages: a copy to many small ones is slower.
    """
    memory = np.empty(_padded_size(tensors), dtype=np.uint8)
    is_any_on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    if is_any_on_gpu and memory.nbytes:
        pin(memory)
    return _views(torch.from_numpy(memory), tensors)


def _padded(num_bytes: int) -> int:
    """Returns the bytes of a tensor with the padding after it."""
    padding = -num_bytes % _ALIGNMENT
    return num_bytes + padding


def _padded_size(tensors: Tensors[Name]) -> int:
    """Returns the bytes of all tensors in one piece of memory."""
    return sum(_padded(tensor.nbytes) for tensor in tensors.values())


def _views(memory: Tensor, tensors: Tensors[Name]) -> dict[Name, Tensor]:
    """Returns views of memory in the shapes and dtypes of tensors, one after the other."""
    views = {}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        piece = memory[start:end].view(tensor.dtype)
        views[name] = piece.view(tensor.shape)
        start += _padded(tensor.nbytes)
    return views
