"""Host memory from which and to which a GPU copies at full speed."""

import math
import weakref
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch

_ALIGNMENT = 64
"""Bytes; a multiple of the size of any element."""
Name = TypeVar("Name")


def pin(memory: np.ndarray) -> None:
    """Pins the memory of an array until the array is freed. Raises torch.AcceleratorError if CUDA refuses it.

    CUDA takes an address that is still registered for the old memory: a later allocation there fails with "resource
    already mapped". So the registration ends before the memory does.
    """
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the driver does it when the process ends


def host_places(tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
    """Host memory for the values of each tensor, without values yet, pinned for tensors of a GPU.

    It is one piece of memory of NumPy, which has large pages: a copy to many small ones is slower.
    """
    sizes = [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    memory = np.empty(sum(sizes), dtype=np.uint8)
    if memory.nbytes and any(tensor.is_cuda for tensor in tensors.values()):
        pin(memory)
    pieces = torch.from_numpy(memory).split(sizes)
    return {
        name: piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }
