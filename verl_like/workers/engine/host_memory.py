"""Host memory for tensors that are on the device only while they are needed."""

from collections.abc import Hashable, Mapping

import torch
from torch.distributed.tensor import DTensor

from verl_like.workers.pinned_memory import host_places


class HostMemory:
    """A place in host memory for each of some tensors, which stays.

    For tensors of a GPU it is pinned, so that no copy waits: `to_host` is done when the stream is.

    Args:
        tensors: by a name; also DTensors, of which each rank has its part.
    """

    @torch.no_grad()  # to_local() is then no operation
    def __init__(self, tensors: Mapping[Hashable, torch.Tensor]) -> None:
        memory = host_places({name: local_part(tensor) for name, tensor in tensors.items()})
        self.places: dict[Hashable, torch.Tensor] = {}
        for name, tensor in tensors.items():
            place = torch.empty_like(tensor, device="cpu")
            local_part(place).data = memory[name]
            self.places[name] = place

    def __contains__(self, name: Hashable) -> bool:
        return name in self.places

    @torch.no_grad()
    def to_host(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's place, to which its values are copied unless it lies there."""
        place = self.places[name]
        lies_there = (
            not tensor.is_cuda and local_part(tensor).data_ptr() == local_part(place).data_ptr()
        )
        return tensor if lies_there else place.copy_(tensor, non_blocking=True)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
