"""Gathers whole tensors from the shards that the ranks of a trainer hold."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def whole_tensors(tensors: Sequence[Tensor], is_kept: bool) -> list[Tensor]:
    """Returns the tensors, all of one dtype, with DTensors gathered: a collective call.

    All that lie in rows over the same ranks, as FSDP2 cuts parameters, are gathered by one call,
    and each of the others by a call of its own. Without `is_kept` this rank only takes part, and
    the list is empty.
    """
    in_rows: dict[tuple[Any, int], list[int]] = defaultdict(list)
    whole = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor):
            whole[index] = tensor
            continue
        mesh_dim = _dim_of_rows(tensor)
        if mesh_dim is None:
            whole[index] = tensor.full_tensor()
        else:
            in_rows[tensor.device_mesh, mesh_dim].append(index)
    for (mesh, mesh_dim), indices in in_rows.items():
        together = [tensors[index] for index in indices]
        group = mesh.get_group(mesh_dim)
        num_ranks = mesh.size(mesh_dim)
        gathered = _gather_rows(together, group, num_ranks, is_kept)
        whole |= dict(zip(indices, gathered, strict=is_kept))
    if not is_kept:
        return []
    return [whole[index] for index in range(len(tensors))]


def _dim_of_rows(tensor: DTensor) -> int | None:
    """Returns the dimension of the mesh along which a tensor is cut into rows. It is None if the
    tensor is not cut so, or along several dimensions of the mesh."""
    dim_of_rows = None
    for dim, placement in enumerate(tensor.placements):
        # FSDP2 cuts experts that are distributed already, also where one rank has all of a part.
        cuts_nothing = type(placement) is _StridedShard and tensor.device_mesh.size(dim) == 1
        if placement.is_replicate() or cuts_nothing:
            continue
        lies_in_rows = type(placement) is Shard and placement.dim == 0
        if not lies_in_rows or dim_of_rows is not None:
            return None
        dim_of_rows = dim
    return dim_of_rows


def _gather_rows(tensors: Sequence[Any], group: Any, num_ranks: int, is_kept: bool) -> list[Tensor]:
    """Gathers whole tensors from the rows that each rank of the group has, in one call. The list is
    empty without `is_kept`."""
    if num_ranks == 1:
        return [tensor.to_local() for tensor in tensors] if is_kept else []
    # Every rank sends as many rows as the first one has. The last ones may have fewer rows, or
    # none; what they send after those is never read.
    sizes = []
    local = []
    for tensor in tensors:
        num_rows = math.ceil(tensor.shape[0] / num_ranks)
        num_columns = math.prod(tensor.shape[1:])
        sizes.append(num_rows * num_columns)
        own_rows = tensor.to_local()
        local.append(own_rows.reshape(-1))
    sent = local[0].new_empty(sum(sizes))
    places = []
    for values, place in zip(local, sent.split(sizes), strict=True):
        places.append(place[: len(values)])
    torch._foreach_copy_(places, local)
    received = sent.new_empty(num_ranks * len(sent))
    dist.all_gather_into_tensor(received, sent, group=group)
    if not is_kept:
        return []
    by_rank = received.view(num_ranks, -1)
    parts = by_rank.split(sizes, dim=1)
    whole = []
    for tensor, part in zip(tensors, parts, strict=True):
        padded = part.reshape(-1)
        values = padded[: tensor.numel()]
        whole.append(values.view(tensor.shape))
    return whole
