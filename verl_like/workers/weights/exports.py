"""Carries the trainer's weights to the rollout engines and checks that they arrived."""

import hashlib
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DEFAULT_BUCKET_BYTES = 256 << 20

_MULTIPLIER, _SHIFT = 0x2C1B3C6D, 15  # of a value's bits
_INDEX_MULTIPLIERS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
# A chunk's temporaries stay in the cache of a CPU core
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}


class WeightSyncError(RuntimeError):
    """The engine's weights are not the trainer's."""


class StaleWeightsError(WeightSyncError):
    """What was sent is not there any more, as when newer weights took its place; the receiver keeps
    what it has."""


@dataclass(frozen=True)
class WeightBucket:
    """Whole parameters or buffers of a model, one after the other in contiguous memory that pickles
    out of band."""

    index: int
    """Position in the order of all buckets of all ranks."""
    names: tuple[str, ...]
    """Hugging Face names."""
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """Name of the torch dtype of all its values, e.g. `bfloat16`."""
    data: Any
    """(bytes,) uint8: the values; a NumPy array, or something that NumPy takes for one."""


@dataclass(frozen=True)
class WeightExport:
    """One trainer rank's share of the weights; the exports of all ranks together hold everything
    once.

    A model's weights are its parameters, and the buffers that its checkpoints hold
    (`model_buffers`).
    """

    version: int
    """Which update of the policy these weights are."""
    rank: int
    world_size: int
    dtype: str
    """Name of the torch dtype of the parameters. A buffer has the dtype that it has in the
    trainer."""
    num_tensors: int
    """Parameters and buffers of the model, over all ranks."""
    num_buckets: int
    """Of the model, over all ranks."""
    fingerprints: dict[str, int]
    """Of each tensor, by its name, the part that this rank answers for; the sum over ranks is the
    tensor's."""
    buckets: tuple[WeightBucket, ...]
    """This rank's buckets: every `world_size`-th one."""
    address: tuple[str, int] | None = None
    """Host and port of this rank's store, where the transport has one."""

    @property
    def num_bytes(self) -> int:
        return sum(bucket.data.nbytes for bucket in self.buckets)


def allocate_memory(num_bytes: int, pinned: bool) -> np.ndarray:
    """(num_bytes,) uint8, uninitialised host memory of this process."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()


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


def in_order(
    parameters: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    buffers: Iterable[tuple[str, torch.Tensor]],
) -> list[tuple[str, torch.Tensor, torch.dtype]]:
    """(name, tensor, dtype in which it travels) in the order in which they do, that with the widest
    elements first.

    Parameters are cast to `dtype`; buffers keep theirs. vLLM packs all of them into one piece of
    memory, in which each has to begin at a multiple of its elements' size.
    """
    weights = [(name, tensor, dtype) for name, tensor in parameters]
    weights += [(name, tensor, tensor.dtype) for name, tensor in buffers]
    return sorted(weights, key=lambda weight: -weight[2].itemsize)


@torch.no_grad()
def collect_weights(
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
    *,
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    allocate: Callable[[int, bool], np.ndarray] | None = allocate_memory,
) -> WeightExport:
    """Gathers a model's weights and keeps this rank's share of them; a collective call when there
    are DTensors.

    Every rank takes part in gathering every bucket, so that beside its share a rank holds one
    bucket, twice while it is put together. The fingerprint is taken from the shards before they are
    gathered: it does not depend on the gathering, the buckets or the transport, and so it detects
    errors in them. Raises ValueError for a name twice, no parameter at all, or a DTensor that is
    not cut along whole rows or columns.

    Args:
        parameters: (Hugging Face name, parameter), in the same order on every rank; full tensors or
            DTensors. Use `named_parameters()`, which lists tied parameters once.
        buffers: (Hugging Face name, buffer), as the parameters. Their values are not cast.
        dtype: the rollout engine's dtype; parameters are cast to it before they are gathered.
        rank: this process among the `world_size` processes of a trainer that each export a share.
        version: which update of the policy these weights are.
        bucket_bytes: size at which a bucket is closed; a larger parameter gets a bucket of its own.
        allocate: gives the (bytes,) uint8 host memory of a bucket, pinned where the second argument
            says so. With None nothing is gathered, and the buckets have no values.
    """
    fingerprints: dict[str, torch.Tensor | int] = {}
    buckets: list[WeightBucket] = []
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = 0
    pending_dtype = dtype
    num_buckets = 0

    def close_bucket() -> None:
        nonlocal pending_bytes, num_buckets
        is_kept = num_buckets % world_size == rank
        names, tensors = zip(*pending, strict=True)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        whole = whole_tensors(tensors, is_kept) if allocate else []
        if is_kept:
            data = _pack(whole, allocate) if allocate else np.empty(0, np.uint8)
            buckets.append(WeightBucket(num_buckets, names, shapes, _name(pending_dtype), data))
        pending.clear()
        pending_bytes = 0
        num_buckets += 1

    for name, weight, own_dtype in in_order(parameters, dtype, buffers):
        if name in fingerprints:
            raise ValueError(
                f"Parameter {name} is exported twice; pass named_parameters(), not a state dict."
            )
        # `to` takes 1 us to do nothing
        tensor = weight if weight.dtype == own_dtype else weight.to(own_dtype)
        fingerprints[name] = local_fingerprint(name, tensor, rank)
        if pending and (pending_bytes + tensor.nbytes > bucket_bytes or pending_dtype != own_dtype):
            close_bucket()
        pending_dtype = own_dtype
        pending.append((name, tensor))
        pending_bytes += tensor.nbytes
    if not fingerprints:
        raise ValueError("There is no parameter to export; pass the model's named_parameters().")
    close_bucket()
    return WeightExport(
        version=version,
        rank=rank,
        world_size=world_size,
        dtype=_name(dtype),
        num_tensors=len(fingerprints),
        num_buckets=num_buckets,
        fingerprints=read_fingerprints(fingerprints),
        buckets=tuple(buckets),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _pack(
    tensors: Sequence[torch.Tensor], allocate: Callable[[int, bool], np.ndarray]
) -> np.ndarray:
    """(bytes,) uint8 host memory with the values of tensors of one dtype, one after the other."""
    pieces = list(map(torch.ravel, tensors))
    on_gpu = pieces[0].is_cuda
    sizes = [piece.numel() for piece in pieces]
    # Always a copy: the trainer goes on writing into its parameters. One call for all, since a
    # model has thousands.
    data = allocate(sum(sizes) * pieces[0].itemsize, on_gpu)
    values = torch.from_numpy(data).view(pieces[0].dtype)
    if on_gpu:  # pinned, so that the copies queue and are awaited once
        torch._foreach_copy_(values.split(sizes), pieces, non_blocking=True)
        torch.cuda.synchronize()
    else:
        torch.cat(pieces, out=values)
    return data


def check_exports(exports: Sequence[WeightExport], version: int) -> dict[str, int]:
    """Checks that the exports are one complete set of version `version`; returns the fingerprint of
    each parameter and buffer by name.

    Raises WeightSyncError if a rank, bucket or parameter is missing or there twice, or versions or
    dtypes differ.
    """
    if not exports:
        raise WeightSyncError(f"Weights of version {version}: no rank exported anything.")
    first = exports[0]
    names = [name for export in exports for bucket in export.buckets for name in bucket.names]
    shared = {
        name: getattr(first, name) for name in ("world_size", "dtype", "num_tensors", "num_buckets")
    }
    shared["version"] = version
    checks: list[tuple[str, Any, Any]] = [
        *(
            (f"{name} of rank {e.rank}", getattr(e, name), value)
            for e in exports
            for name, value in shared.items()
        ),
        ("ranks", sorted(export.rank for export in exports), list(range(first.world_size))),
        (
            "buckets",
            sorted(b.index for export in exports for b in export.buckets),
            list(range(first.num_buckets)),
        ),
        ("number of tensors", len(names), first.num_tensors),
        ("number of different tensors", len(set(names)), first.num_tensors),
    ]
    for what, got, expected in checks:
        if got != expected:
            raise WeightSyncError(
                f"Weights of version {version}, {what}: expected {expected}, got {got}."
            )
    return {
        name: sum(export.fingerprints.get(name, 0) for export in exports) % 2**64 for name in names
    }


def check_arrival(
    expected: Mapping[str, Any],
    loaded: Mapping[str, Any],
    failure: str,
    error: type[Exception] = WeightSyncError,
) -> str:
    """One fingerprint of all weights together, 64 bits in hexadecimal, if the two are equal; else
    raises `error`, which says `failure` and which parameters or buffers differ.
    """
    names = sorted(
        name for name in {**expected, **loaded} if expected.get(name) != loaded.get(name)
    )
    if names:
        more = ", ..." if len(names) > 5 else ""
        raise error(
            f"{failure}: {len(names)} of {len(expected)} tensors differ from the trainer's: "
            f"{', '.join(names[:5])}{more}."
        )
    return hashlib.blake2b(repr(sorted(expected.items())).encode(), digest_size=8).hexdigest()


def check_staged(exports: Sequence[WeightExport], version: int, device: str) -> dict[str, int]:
    """The trainer's fingerprint of each tensor, by name, if the exports are complete and hold the
    trainer's values.

    `device` computes the fingerprints, of one tensor at a time. All ranks of a process group call
    it, since they load together: what one of them refuses, all do. Raises WeightSyncError as
    `check_exports` does, and StaleWeightsError if a value is not the trainer's.
    """
    expected = check_exports(exports, version)
    stale = None
    try:
        staged = read_fingerprints(
            {name: fingerprint_sum(tensor.to(device)) for name, tensor in iterate_weights(exports)}
        )
        check_arrival(
            expected,
            staged,
            f"Weights of version {version} changed on their way",
            StaleWeightsError,
        )
    except StaleWeightsError as error:
        stale = error
    num_stale = torch.tensor(float(stale is not None), device=device)
    if dist.is_initialized():
        dist.all_reduce(num_stale)
    if num_stale:
        raise stale or StaleWeightsError(f"Weights of version {version} are stale on another rank.")
    return expected


def iterate_weights(exports: Sequence[WeightExport]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole parameter or buffer), in the trainer's order, as views of read-only
    memory."""
    return iterate_buckets(bucket for export in exports for bucket in export.buckets)


def iterate_buckets(buckets: Iterable[WeightBucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """What `iterate_weights` yields, of buckets."""
    for bucket in sorted(buckets, key=lambda bucket: bucket.index):
        with warnings.catch_warnings():
            # Buffers in Ray's object store are read-only; nobody writes into these tensors.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(np.asarray(bucket.data)).view(getattr(torch, bucket.dtype))
        sizes = [math.prod(shape) for shape in bucket.shapes]
        # Not Tensor.view, which first tries to read the shape as a dtype and so takes twice as
        # long.
        yield from zip(
            bucket.names, map(torch.reshape, flat.split(sizes), bucket.shapes), strict=True
        )
