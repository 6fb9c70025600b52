"""Pins host memory that NumPy holds, so that a GPU copies from and to it at full speed."""

import weakref

import numpy as np
import torch


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
