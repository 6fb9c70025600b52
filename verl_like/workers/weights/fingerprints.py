"""Fingerprints of tensors, by which weights are compared without being sent."""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_MULTIPLIER, _SHIFT = 0x2C1B3C6D, 15  # of a value's bits
_INDEX_MULTIPLIERS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
# A chunk's temporaries stay in the cache of a CPU core
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}


def fingerprint_tensor(tensor: torch.Tensor, first_row: int = 0, first_column: int = 0) -> int:
    """The fingerprint of a tensor; of several `read_fingerprints` reads them in one go.

    Sum over rows i and columns j of a_i * mix(x_ij, b_j), modulo 2**64, of the elements' float32
    bits x_ij.

    Dimension 0 is the rows, all others together are the columns. a_i and b_j are odd and
    pseudo-random functions of the index; `first_row` and `first_column` say where a piece of a
    parameter begins in it. So the fingerprints of the pieces add up to that of the parameter,
    however it was sharded or fused with others. Zeros, as in a padded vocabulary, add nothing,
    since mix keeps 0. Converting bfloat16 or float16 to float32 is exact, so a parameter kept in a
    wider dtype has the same fingerprint too. Any change, such as of one bit or of two elements that
    trade places, changes the fingerprint all but surely. Elements that float32 cannot hold, as of
    int64, count as their 32-bit words.
    """
    return read_fingerprints({"": fingerprint_sum(tensor, first_row, first_column)})[""]


def read_fingerprints(sums: Mapping[str, torch.Tensor | int]) -> dict[str, int]:
    """The fingerprints of tensors by name, from their `fingerprint_sum`; waits once for each
    device."""
    read = {name: value for name, value in sums.items() if isinstance(value, int)}
    on_device: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, value in sums.items():
        if isinstance(value, torch.Tensor):
            on_device[value.device][name] = value
    for found in on_device.values():
        read |= dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
    return {name: read[name] % 2**64 for name in sums}


def fingerprint_sum(
    tensor: torch.Tensor, first_row: int = 0, first_column: int = 0
) -> torch.Tensor:
    """() int64, the fingerprint of `fingerprint_tensor` as a signed number, still on the device of
    the tensor."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    matrix = tensor.detach().reshape(math.prod(tensor.shape[:1]), -1)
    if matrix.itemsize == 8:
        matrix = matrix.view(torch.int32)
    num_rows, num_columns = matrix.shape
    chunk_elements = _ELEMENTS_PER_CHUNK[tensor.device.type]
    width = min(num_columns, chunk_elements)
    row_factors = _odd_factors(first_row, num_rows, tensor.device)
    for left, block in zip(range(0, num_columns, width), matrix.split(width, dim=1), strict=True):
        column_factors = (
            _odd_factors(first_column + left, block.shape[1], tensor.device) >> 32
        ).int() | 1
        height = max(1, chunk_elements // width)
        for chunk, factors in zip(block.split(height), row_factors.split(height), strict=True):
            bits = chunk if chunk.dtype == torch.int32 else chunk.float().view(torch.int32)
            mixed = bits * _MULTIPLIER  # wraps around modulo 2**32, as below
            mixed ^= mixed >> _SHIFT
            mixed *= column_factors
            mixed ^= mixed >> _SHIFT
            total += (mixed.sum(dim=1, dtype=torch.int64) * factors).sum()
    return total


def _odd_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """(count,) int64: a pseudo-random odd number for each index from `first`."""
    first_multiplier, second_multiplier = _INDEX_MULTIPLIERS
    mixed = torch.arange(first + 1, first + count + 1, device=device) * first_multiplier
    mixed ^= mixed >> 32
    mixed *= second_multiplier
    mixed ^= mixed >> 29
    return mixed | 1


def local_fingerprint(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | int:
    """The `fingerprint_sum` of what this rank answers for: of several copies of a value, one
    counts."""
    if not isinstance(tensor, DTensor):
        return fingerprint_sum(tensor) if rank == 0 else 0
    if not all(p.is_replicate() or (type(p) is Shard and p.dim < 2) for p in tensor.placements):
        raise ValueError(
            f"Parameter {name} is placed as {tensor.placements}; only Replicate(), Shard(0) and "
            "Shard(1) can be exported. Redistribute it before."
        )
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"rank {rank} exports {name} but is not part of its device mesh"
    # Of several trainers of a model each exports on its own: what counts is the copy that its first
    # rank has a part of.
    first = (tensor.device_mesh.mesh == dist.get_rank() - rank).nonzero()[0].tolist()
    if any(
        p.is_replicate() and a != b
        for p, a, b in zip(tensor.placements, coordinate, first, strict=True)
    ):
        return 0
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    row, column = (*offsets, 0, 0)[:2]
    return fingerprint_sum(tensor.to_local(), row, column * math.prod(tensor.shape[2:]))
