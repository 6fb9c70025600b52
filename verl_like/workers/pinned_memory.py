"""Host memory from which and to which a GPU copies at full speed."""

import contextlib
import math
import weakref
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch

_ALIGNMENT = 64
"""Bytes; a multiple of the size of any element."""
Name = TypeVar("Name")


_READ_ONLY = 0x08
"""cudaHostRegisterReadOnly."""


def pin(memory: np.ndarray, *, read_only: bool = False) -> None:
    """Pins the memory of an array until the array is freed. Raises torch.cuda.CudaError if CUDA
    refuses it.

    `read_only` memory is that which this process may not write, which not every driver pins.

    CUDA takes an address that is still registered for the old memory: a later allocation there
    fails with "resource already mapped". So the registration ends before the memory does.
    """
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    flags = _READ_ONLY if read_only else 0
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, flags))
    except torch.cuda.CudaError:
        _forget_last_error()
        raise
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the driver does it when the process ends


def _forget_last_error() -> None:
    """CUDA keeps the error of a call until it is read, which the launch of the next kernel does."""
    with contextlib.suppress(torch.AcceleratorError):
        torch.zeros(1, device="cuda")


def to_device(tensors: Mapping[Name, torch.Tensor], device: str) -> dict[Name, torch.Tensor]:
    """Tensors of the host on a device. To a GPU all of them go in one copy, which nobody waits
    for."""
    if device == "cpu":
        return dict(tensors)
    sizes = _padded_sizes(tensors)
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    for tensor, piece in zip(tensors.values(), staged.split(sizes), strict=True):
        _as(tensor, piece).copy_(tensor)
    # Torch keeps what is staged until the copy is done
    moved = staged.to(device, non_blocking=True)
    pieces = moved.split(sizes)
    return {
        name: _as(tensor, piece)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host itself; of a GPU a pinned copy, with one wait for all that the GPU has
    to do before."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copy


def host_places(tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
    """Host memory for the values of each tensor, without values yet, pinned for tensors of a GPU.

    It is one piece of memory of NumPy, which has large pages: a copy to many small ones is slower.
    """
    sizes = _padded_sizes(tensors)
    memory = np.empty(sum(sizes), dtype=np.uint8)
    if memory.nbytes and any(tensor.is_cuda for tensor in tensors.values()):
        pin(memory)
    pieces = torch.from_numpy(memory).split(sizes)
    return {
        name: _as(tensor, piece)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }


def _padded_sizes(tensors: Mapping[Name, torch.Tensor]) -> list[int]:
    """Bytes of each tensor in one piece of memory, with what is between it and the next one."""
    return [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]


def _as(tensor: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """The bytes at the start of a piece of memory in the shape and type of a tensor."""
    return piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
