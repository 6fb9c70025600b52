"""Makes whole tensors of the shards that the ranks of a trainer have."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def whole_tensors(tensors: Sequence[torch.Tensor], is_kept: bool = True) -> list[torch.Tensor]:
    """The tensors, all of one dtype, of which DTensors are gathered: a collective call.

    One call gathers all that lie in rows over the same ranks, as FSDP2 cuts parameters, and one
    each of the others. Without `is_kept` this rank only takes part, and returns none.
    """
    in_rows: dict[tuple[Any, int], list[int]] = defaultdict(list)
    whole: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        mesh_dim = _dim_of_rows(tensor)
        if isinstance(tensor, DTensor) and mesh_dim is not None:
            in_rows[tensor.device_mesh, mesh_dim].append(index)
        else:
            whole[index] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    for (mesh, mesh_dim), indices in in_rows.items():
        together = [tensors[index] for index in indices]
        gathered = _gather_rows(together, mesh.get_group(mesh_dim), mesh.size(mesh_dim), is_kept)
        whole |= dict(zip(indices, gathered, strict=is_kept))
    return [whole[index] for index in range(len(tensors))] if is_kept else []


def _dim_of_rows(tensor: torch.Tensor) -> int | None:
    """The dimension of the mesh over which a DTensor's rows lie; None if they do not, or over
    several."""
    if not isinstance(tensor, DTensor):
        return None
    cut = [
        (dim, placement)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return cut[0][0] if len(cut) == 1 and type(cut[0][1]) is Shard and cut[0][1].dim == 0 else None


def _gather_rows(
    tensors: Sequence[Any], group: Any, num_ranks: int, is_kept: bool
) -> list[torch.Tensor]:
    """Whole tensors from the rows that each rank of the group has; none without `is_kept`."""
    if num_ranks == 1:
        return [tensor.to_local() for tensor in tensors] if is_kept else []
    # A rank has as many rows as the others; the last ones may have fewer, or none, which are sent
    # as they come.
    rows = [-(-tensor.shape[0] // num_ranks) for tensor in tensors]
    columns = [math.prod(tensor.shape[1:]) for tensor in tensors]
    sizes = [count * width for count, width in zip(rows, columns, strict=True)]
    local = [tensor.to_local().reshape(-1) for tensor in tensors]
    sent = torch.empty(sum(sizes), dtype=local[0].dtype, device=local[0].device)
    places = [place[: part.numel()] for place, part in zip(sent.split(sizes), local, strict=True)]
    torch._foreach_copy_(places, local)
    received = sent.new_empty(num_ranks * len(sent))
    dist.all_gather_into_tensor(received, sent, group=group)
    if not is_kept:
        return []
    parts = received.view(num_ranks, -1).split(sizes, dim=1)
    return [
        part.reshape(-1)[: tensor.numel()].view(tensor.shape)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
