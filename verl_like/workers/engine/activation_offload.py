"""Keeps what a backward pass needs in host memory until then."""

from typing import Any

import torch
from torch import nn

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay: moving one costs more than the memory is worth."""


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Within it, large tensors that autograd saves go to host memory; the backward pass fetches each when it needs it.

    Parameters stay where they are. With gradient checkpointing the saved tensors are the inputs of the decoder layers.
    On CUDA the copies to the host run beside the computation.
    """

    def __init__(self) -> None:
        super().__init__(self._save, self._fetch)
        self.side_stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def _save(self, tensor: torch.Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        on_gpu = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        if not on_gpu:
            return tensor.device, host.copy_(tensor), None
        assert self.side_stream is not None
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.side_stream)  # its memory is not given away before the copy is done
        return tensor.device, host, self.side_stream.record_event()

    def _fetch(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        device, host, copied = saved
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
        return host.to(device, non_blocking=True)
