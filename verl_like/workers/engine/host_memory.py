"""Host memory for tensors that are on the device only while they are used."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_like.workers.pinned_memory import host_places


class HostMemory:
    """A permanent place in host memory for each of some tensors.

    Places for tensors of a GPU are pinned, so that a copy does not wait: the values are in the
    place after the work of the stream is done.

    Args:
        tensors: the tensors by any name. Of a DTensor each rank has its part.
    """

    @torch.no_grad()  # to_local() is then no operation
    def __init__(self, tensors: Mapping[Hashable, Tensor]) -> None:
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        self.places: dict[Hashable, Tensor] = {}
        for name, memory in host_places(parts).items():
            place = torch.empty_like(tensors[name], device="cpu")
            local_part(place).data = memory
            self.places[name] = place

    def __contains__(self, name: Hashable) -> bool:
        return name in self.places

    @torch.no_grad()
    def to_host(self, name: Hashable, tensor: Tensor) -> Tensor:
        """Copies a tensor to its place and returns the place, or returns a tensor that is its
        place already."""
        place = self.places[name]
        if not tensor.is_cuda:
            address = local_part(tensor).data_ptr()
            if address == local_part(place).data_ptr():
                return tensor
        return place.copy_(tensor, non_blocking=True)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, or another tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
