"""Fingerprints of tensors, by which the engine's weights are compared with the trainer's."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from verl_like.workers.weights.file_layout import FileTensor

_MULTIPLIER = 0x2C1B3C6D
_SHIFT = 15
"""The constants of `mix`, which scrambles the bits of a value."""
_FIRST_INDEX_MULTIPLIER = 0x1E3779B97F4A7C15
_SECOND_INDEX_MULTIPLIER = 0x3F58476D1CE4E5B9
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}
"""How many elements are mixed at once, by the type of the device. On a CPU the temporaries of a
chunk stay in the cache of a core."""


def fingerprint_tensor(tensor: Tensor, first_row: int = 0, first_column: int = 0) -> int:
    """Returns the fingerprint of a tensor. `read_fingerprints` reads those of several tensors with
    one wait for the device.

    It is the sum over rows i and columns j of a_i * mix(x_ij, b_j), modulo 2**64, where x_ij are
    the bits of the elements as float32.

    Dimension 0 is the rows, all others together are the columns. a_i and b_j are odd and
    pseudo-random functions of the index; `first_row` and `first_column` say where a piece of a
    parameter begins in it. So the fingerprints of the pieces add up to that of the parameter,
    however it was sharded or fused with others. Zeros, as in a padded vocabulary, add nothing,
    since mix keeps 0. Converting bfloat16 or float16 to float32 is exact, so a parameter kept in a
    wider dtype has the same fingerprint too. Any change, such as of one bit or of two elements that
    trade places, changes the fingerprint all but surely. Elements that float32 cannot hold, as of
    int64, count as their 32-bit words.
    """
    total = fingerprint_sum(tensor, first_row, first_column)
    return read_fingerprints({"": total})[""]


def read_fingerprints(sums: Mapping[str, Tensor | int]) -> dict[str, int]:
    """Returns the fingerprints of tensors by name; waits once for each device.

    `sums` has what `fingerprint_sum` returned, which is signed, or the 0 of a rank that does not
    answer for the tensor.
    """
    read = {}
    on_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, value in sums.items():
        if isinstance(value, int):
            read[name] = value
        else:
            on_device[value.device][name] = value
    for tensors in on_device.values():
        together = torch.stack(list(tensors.values()))
        values = together.tolist()
        read |= dict(zip(tensors, values, strict=True))
    return {name: read[name] % 2**64 for name in sums}


def sum_over_ranks(fingerprints: Mapping[str, int], group: Any = None) -> dict[str, int]:
    """Returns the sums of fingerprints over the ranks of a process group, modulo 2**64.

    It is a collective call, and every rank has the same names.
    """
    names = sorted(fingerprints)
    values = [fingerprints[name] for name in names]
    sums = np.array(values, dtype=np.uint64)
    # torch adds up signed numbers, whose sums have the same bits.
    signed = torch.from_numpy(sums.view(np.int64))
    dist.all_reduce(signed, group=group)
    totals = sums.tolist()
    return dict(zip(names, totals, strict=True))


def fingerprint_sum(tensor: Tensor, first_row: int = 0, first_column: int = 0) -> Tensor:
    """Returns the fingerprint of `fingerprint_tensor` as a signed number, () int64, on the device
    of the tensor."""
    device = tensor.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if tensor.numel() == 0:
        return total
    num_rows = math.prod(tensor.shape[:1])
    matrix = tensor.detach().reshape(num_rows, -1)
    if matrix.itemsize == 8:
        matrix = matrix.view(torch.int32)
    num_columns = matrix.shape[1]
    chunk_elements = _ELEMENTS_PER_CHUNK[device.type]
    width = min(num_columns, chunk_elements)
    height = max(1, chunk_elements // width)
    row_factors = _odd_factors(first_row, num_rows, device)
    factors_of_chunks = row_factors.split(height)
    for left in range(0, num_columns, width):
        block = matrix[:, left : left + width]
        block_width = block.shape[1]
        wide_factors = _odd_factors(first_column + left, block_width, device)
        column_factors = (wide_factors >> 32).int() | 1
        chunks = block.split(height)
        for chunk, factors in zip(chunks, factors_of_chunks, strict=True):
            bits = chunk
            if chunk.dtype != torch.int32:
                bits = chunk.float().view(torch.int32)
            mixed = bits * _MULTIPLIER  # wraps around modulo 2**32, as below
            mixed ^= mixed >> _SHIFT
            mixed *= column_factors
            mixed ^= mixed >> _SHIFT
            row_sums = mixed.sum(dim=1, dtype=torch.int64)
            total += (row_sums * factors).sum()
    return total


def _odd_factors(first: int, count: int, device: torch.device) -> Tensor:
    """Returns a pseudo-random odd number for each of the indices from `first`, (count,) int64."""
    start = first + 1
    indices = torch.arange(start, start + count, device=device)
    mixed = indices * _FIRST_INDEX_MULTIPLIER
    mixed ^= mixed >> 32
    mixed *= _SECOND_INDEX_MULTIPLIER
    mixed ^= mixed >> 29
    return mixed | 1


def _cuts_distributed_rows(tensor: DTensor, dim: int) -> bool:
    """Returns True if FSDP2 cuts, along this dimension of the mesh, rows that the last dimension
    has distributed already, such as experts. All ranks have equally many rows, so those of a rank
    follow each other."""
    placement = tensor.placements[dim]
    if type(placement) is not _StridedShard or tensor.placements[-1] != Shard(0):
        return False
    num_distributed = tensor.device_mesh.size(-1)
    num_shares = num_distributed * tensor.device_mesh.size(dim)
    is_whole_rows = placement.dim == 0 and len(tensor) % num_shares == 0
    return is_whole_rows and placement.split_factor == num_distributed


def local_fingerprint(
    file: FileTensor, tensor: Tensor, rank: int, counting_rank: int
) -> Tensor | int:
    """Returns this rank's share of the fingerprint of `file`, a tensor of a checkpoint's files that
    is a view of the model's `tensor`. The shares of all ranks add up to it, modulo 2**64.

    A share is a `fingerprint_sum`, or 0. Raises ValueError for a DTensor that is not cut along
    whole rows or columns, and where `FileTensor.of_rows` does.

    Args:
        file: the tensor of the files.
        tensor: the tensor of the model.
        rank: this process among those of its trainer.
        counting_rank: of equal copies the one counts that this rank of the trainer has a part of.
    """
    if not isinstance(tensor, DTensor):
        return fingerprint_sum(file.of(tensor)) if rank == counting_rank else 0
    mesh = tensor.device_mesh
    placements = tensor.placements
    num_dims = 2 if file.is_whole else 1
    for dim, placement in enumerate(placements):
        is_cut = type(placement) is Shard and placement.dim < num_dims
        is_cut = is_cut or _cuts_distributed_rows(tensor, dim)
        if not is_cut and not placement.is_replicate():
            allowed = "Replicate(), Shard(0) and Shard(1)" if file.is_whole else "Shard(0)"
            raise ValueError(
                f"Parameter {file.name} is placed as {placements}; only {allowed} can be exported. "
                "Redistribute it before."
            )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, (
        f"rank {rank} exports {file.name} but is not part of its device mesh"
    )
    # The mesh may have the ranks of several trainers, one trainer after the other, and each trainer
    # exports on its own.
    first_rank = dist.get_rank() - rank
    places = (mesh.mesh == first_rank + counting_rank).nonzero()
    counting_coordinate = places[0].tolist()
    for dim, placement in enumerate(placements):
        is_in_copy = coordinate[dim] == counting_coordinate[dim]
        if placement.is_replicate() and not is_in_copy:
            return 0
    _shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    first_row = 0
    first_column = 0
    if len(offsets) > 0:
        first_row = offsets[0]
    if len(offsets) > 1:
        columns_per_index = math.prod(tensor.shape[2:])
        first_column = offsets[1] * columns_per_index
    own = tensor.to_local()
    if file.is_whole:
        return fingerprint_sum(own, first_row, first_column)
    part = file.of_rows(own, first_row)
    return 0 if part is None else fingerprint_sum(part.values, part.first_row)
