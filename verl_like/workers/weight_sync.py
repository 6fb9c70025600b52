"""Carries the trainer's weights to the rollout engines and checks that they arrived."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor

DEFAULT_BUCKET_BYTES = 256 << 20

# Odd multipliers and a shift mix the bits of a value; each step is a bijection of 32-bit integers that keeps 0.
_FIRST_MULTIPLIER, _SHIFT, _SECOND_MULTIPLIER = 0x2C1B3C6D, 15, 0x297A2D39
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}  # a chunk's temporaries stay in the cache of a CPU core


class WeightSyncError(RuntimeError):
    """The engine's weights are not the trainer's."""


@dataclass(frozen=True)
class WeightBucket:
    """Whole parameters, one after the other, in one contiguous buffer that pickles out of band."""

    index: int
    """Position in the order of all buckets of all ranks."""
    names: tuple[str, ...]
    """Hugging Face parameter names."""
    shapes: tuple[tuple[int, ...], ...]
    data: np.ndarray
    """(bytes,) uint8: the values in the export's dtype."""


@dataclass(frozen=True)
class WeightExport:
    """One trainer rank's share of the weights; the exports of all ranks together hold every parameter once."""

    version: int
    """Which update of the policy these weights are."""
    rank: int
    world_size: int
    dtype: str
    """Name of the torch dtype of all values, e.g. `bfloat16`."""
    num_parameters: int
    """Parameters of the model, over all ranks."""
    num_buckets: int
    """Buckets of the model, over all ranks."""
    fingerprint: int
    """Fingerprint of the parameter shards that live on this rank; the sum over ranks is the model's."""
    buckets: tuple[WeightBucket, ...]
    """This rank's buckets: every `world_size`-th one."""

    @property
    def num_bytes(self) -> int:
        return sum(bucket.data.nbytes for bucket in self.buckets)


def fingerprint_tensor(tensor: torch.Tensor) -> int:
    """Sum over all elements of a 32-bit hash of the element's float32 bits, modulo 2**64.

    The sum of the fingerprints of pieces is the fingerprint of the whole, in any order, and zeros add nothing: fused
    projections, shards and padded vocabularies have the fingerprint of the parameters they were made of. Converting
    bfloat16 or float16 to float32 is exact, so a parameter kept in a wider dtype has the same fingerprint too. A change
    of one element always changes the fingerprint, other changes all but surely; a permutation does not.
    """
    total = 0
    for chunk in tensor.detach().reshape(-1).split(_ELEMENTS_PER_CHUNK[tensor.device.type]):
        mixed = chunk.float().view(torch.int32) * _FIRST_MULTIPLIER  # wraps around modulo 2**32, as below
        mixed ^= mixed >> _SHIFT
        mixed *= _SECOND_MULTIPLIER
        total += int(mixed.sum(dtype=torch.int64))
    return total % 2**64


def collect_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightExport:
    """Gathers the parameters and keeps this rank's share of them; a collective call when there are DTensors.

    Every rank takes part in gathering every sharded parameter, one at a time, so that beside its share a rank holds one
    full parameter. The fingerprint is taken from the shards before they are gathered: it does not depend on the
    gathering, the buckets or the transport, and so it detects errors in them.

    Args:
        named_tensors: (Hugging Face name, parameter), in the same order on every rank; full tensors or DTensors. Use
            `named_parameters()`, which lists tied parameters once.
        dtype: the rollout engine's dtype; values are cast to it before they are gathered.
        rank: this process among the `world_size` trainer processes that each export a share.
        version: which update of the policy these weights are.
        bucket_bytes: size at which a bucket is closed; a larger parameter gets a bucket of its own.

    Raises:
        ValueError: a name twice, no parameter at all, or a DTensor that is a partial sum.
    """
    names_seen: set[str] = set()
    fingerprint = 0
    buckets: list[WeightBucket] = []
    pending: list[tuple[str, tuple[int, ...], torch.Tensor | None]] = []
    pending_bytes = 0
    num_buckets = 0

    def close_bucket() -> None:
        nonlocal pending_bytes, num_buckets
        if num_buckets % world_size == rank:
            buckets.append(_pack_bucket(num_buckets, pending))
        pending.clear()
        pending_bytes = 0
        num_buckets += 1

    for name, parameter in named_tensors:
        if name in names_seen:
            raise ValueError(f"Parameter {name} is exported twice; pass named_parameters(), not a state dict.")
        names_seen.add(name)
        tensor = parameter.detach().to(dtype)
        fingerprint += _local_fingerprint(name, tensor, rank)
        if pending and pending_bytes + tensor.numel() * dtype.itemsize > bucket_bytes:
            close_bucket()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        pending.append((name, tuple(full.shape), full if num_buckets % world_size == rank else None))
        pending_bytes += full.numel() * dtype.itemsize
    if not names_seen:
        raise ValueError("There is no parameter to export; pass the model's named_parameters().")
    close_bucket()
    return WeightExport(
        version=version,
        rank=rank,
        world_size=world_size,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=len(names_seen),
        num_buckets=num_buckets,
        fingerprint=fingerprint % 2**64,
        buckets=tuple(buckets),
    )


def _local_fingerprint(name: str, tensor: torch.Tensor, rank: int) -> int:
    """The part of the fingerprint that this rank answers for: of several copies of a value, one counts."""
    if not isinstance(tensor, DTensor):
        return fingerprint_tensor(tensor) if rank == 0 else 0
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"Parameter {name} is a partial sum ({tensor.placements}); redistribute it before exporting.")
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"rank {rank} exports {name} but is not part of its device mesh"
    is_copy = any(p.is_replicate() and at > 0 for p, at in zip(tensor.placements, coordinate, strict=True))
    return 0 if is_copy else fingerprint_tensor(tensor.to_local())


def _pack_bucket(index: int, tensors: Sequence[tuple[str, tuple[int, ...], torch.Tensor | None]]) -> WeightBucket:
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, _, tensor in tensors if tensor is not None]
    assert len(pieces) == len(tensors), "a bucket of another rank has no values here"
    on_gpu = pieces[0].is_cuda
    # Always a copy: the trainer goes on writing into its parameters. Pinned, so that copies queue and are awaited once.
    data = torch.empty(sum(piece.numel() for piece in pieces), dtype=torch.uint8, pin_memory=on_gpu)
    for place, piece in zip(data.split([piece.numel() for piece in pieces]), pieces, strict=True):
        place.copy_(piece, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return WeightBucket(
        index=index,
        names=tuple(name for name, _, _ in tensors),
        shapes=tuple(shape for _, shape, _ in tensors),
        data=data.numpy(),
    )


def check_exports(exports: Sequence[WeightExport], version: int) -> int:
    """Checks that the exports are one complete set of version `version`, and returns the model's fingerprint.

    Raises:
        WeightSyncError: a rank, bucket or parameter is missing or there twice, or versions or dtypes differ.
    """
    if not exports:
        raise WeightSyncError(f"Weights of version {version}: no rank exported anything.")
    first = exports[0]
    for export in exports:
        if export.version != version:
            raise WeightSyncError(
                f"Version {version} was announced, but rank {export.rank} exported weights of version {export.version}."
            )
        for field in ("world_size", "dtype", "num_parameters", "num_buckets"):
            if getattr(export, field) != getattr(first, field):
                raise WeightSyncError(
                    f"Weights of version {version}: ranks {first.rank} and {export.rank} disagree on {field}: "
                    f"{getattr(first, field)} and {getattr(export, field)}."
                )
    names = [name for export in exports for bucket in export.buckets for name in bucket.names]
    for what, got, expected in (
        ("ranks", sorted(export.rank for export in exports), list(range(first.world_size))),
        ("buckets", sorted(b.index for export in exports for b in export.buckets), list(range(first.num_buckets))),
    ):
        if got != expected:
            raise WeightSyncError(f"Weights of version {version}: expected {what} {expected}, got {got}.")
    if len(names) != first.num_parameters or len(set(names)) != len(names):
        raise WeightSyncError(
            f"Weights of version {version}: expected {first.num_parameters} parameters, each once; got {len(names)}, "
            f"of which {len(names) - len(set(names))} are repetitions."
        )
    return sum(export.fingerprint for export in exports) % 2**64


def iterate_weights(exports: Sequence[WeightExport]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full parameter), in the trainer's order, as views of the exports' read-only buffers."""
    dtype = getattr(torch, exports[0].dtype)
    buckets = [bucket for export in exports for bucket in export.buckets]
    for bucket in sorted(buckets, key=lambda bucket: bucket.index):
        with warnings.catch_warnings():
            # Buffers in Ray's object store are read-only; nobody writes into these tensors.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(bucket.data).view(dtype)
        sizes = [int(np.prod(shape)) for shape in bucket.shapes]
        for name, shape, values in zip(bucket.names, bucket.shapes, flat.split(sizes), strict=True):
            yield name, values.view(shape)
