"""Keeps tensors that autograd saves for the backward pass in host memory."""

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST_BYTES = 1 << 20
"""Smaller tensors are not offloaded, because the copies would cost more than they save."""


@dataclass(eq=False)
class Offloaded:
    """A saved tensor in host memory."""

    host: Tensor
    device: torch.device
    before: "weakref.ref[Offloaded] | None"
    """The tensor that was saved before this one, if it still exists. The backward pass needs it
    after this one."""
    fetched: Tensor | None = None
    """The copy on the device, after it was begun."""
    arrived: torch.cuda.Event | None = None
    """The event at the end of the copy to a GPU."""


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context in which large tensors that autograd saves are moved to host memory.

    The backward pass copies them back. Parameters stay where they are. With gradient checkpointing
    the saved tensors are the inputs of the decoder layers.

    On CUDA the copies in both directions overlap with the computation. When the backward pass needs
    the input of a layer, the copy of the input of the layer before it begins, too, and arrives
    while the layer is computed.
    """

    def __init__(self) -> None:
        super().__init__(self._save, self._fetch)
        self.side_stream: Any = None
        """A stream of the GPU, if there is one."""
        if torch.cuda.is_available():
            self.side_stream = torch.cuda.Stream()
        self.newest: weakref.ref[Offloaded] | None = None

    def _save(self, tensor: Tensor) -> Any:
        """Copies a tensor to the host, unless it is a parameter or small."""
        base = tensor if tensor._base is None else tensor._base
        is_small = tensor.nbytes < SMALLEST_BYTES
        if is_small or isinstance(base, nn.Parameter):
            return tensor
        is_on_gpu = tensor.is_cuda
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_gpu)
        with self._beside_computation(tensor.device):
            host.copy_(tensor, non_blocking=is_on_gpu)
        if is_on_gpu:
            # torch reuses the tensor's memory only after the copy is done.
            tensor.record_stream(self.side_stream)
        saved = Offloaded(host, tensor.device, self.newest)
        self.newest = weakref.ref(saved)
        return saved

    def _fetch(self, saved: Any) -> Tensor:
        """Returns the tensor of `_save` on its device, and begins to copy the one before it."""
        if isinstance(saved, Tensor):
            return saved
        self._issue(saved)
        before = saved.before and saved.before()
        if before is not None:
            self._issue(before)
        tensor = saved.fetched
        saved.fetched = None
        if saved.arrived is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(saved.arrived)
            tensor.record_stream(stream)
        return tensor

    def _issue(self, saved: Offloaded) -> None:
        """Begins the copy to the device, if it has not begun.

        Both copies are on the side stream, so this one begins after the copy to the host has ended.
        `_fetch` clears `fetched`, so a second backward pass copies again.
        """
        if saved.fetched is not None:
            return
        with self._beside_computation(saved.device):
            saved.fetched = saved.host.to(saved.device, non_blocking=True)
            if saved.fetched.is_cuda:
                stream = torch.cuda.current_stream()
                saved.arrived = stream.record_event()

    def _beside_computation(self, device: torch.device) -> contextlib.AbstractContextManager:
        """Returns a context whose GPU work runs on the side stream, after the work so far.

        On other devices it changes nothing.
        """
        if device.type != "cuda":
            return contextlib.nullcontext()
        computation = torch.cuda.current_stream()
        self.side_stream.wait_stream(computation)
        return torch.cuda.stream(self.side_stream)
