"""The trainer's weights as they leave it: buckets of whole tensors, with their fingerprints."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_like.workers.weights.fingerprints import local_fingerprint, read_fingerprints
from verl_like.workers.weights.gathering import whole_tensors

DEFAULT_BUCKET_BYTES = 256 << 20


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
