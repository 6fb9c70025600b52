"""The trainer's weights as they leave it: buckets of whole tensors, with their fingerprints.

They travel under the names and in the shapes of a checkpoint's files (`file_layout`).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_like.workers.weights.file_layout import FileLayout, FileTensor, files_in
from verl_like.workers.weights.fingerprints import local_fingerprint, read_fingerprints
from verl_like.workers.weights.gathering import whole_tensors

DEFAULT_BUCKET_BYTES = 256 << 20
NamedTensor = tuple[str, Tensor]
"""A Hugging Face name, and the tensor that has it: in a model, or in a checkpoint's files."""
Allocate = Callable[[int, bool], np.ndarray]
"""Returns host memory of a number of bytes, (bytes,) uint8 without values; pinned if the second
argument says so, as it does for copies from a GPU."""


class OrderedWeight(NamedTuple):
    """A parameter or buffer of a model as it travels."""

    tensor: Tensor
    dtype: torch.dtype
    """The dtype in which it travels."""
    files: Sequence[FileTensor]
    """The tensors of files that it holds."""


@dataclass(frozen=True)
class WeightBucket:
    """Whole parameters or buffers, one after the other in contiguous memory that pickles out of
    band."""

    index: int
    """Position in the order of all buckets of all ranks."""
    names: tuple[str, ...]
    """Hugging Face names, as in a checkpoint's files."""
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
    """Number of parameters and buffers, as in a checkpoint's files, over all ranks."""
    num_buckets: int
    """Number of buckets of the model, over all ranks."""
    fingerprints: dict[str, int]
    """By the name of each tensor the part of its fingerprint that this rank answers for; the sum
    over ranks is the tensor's fingerprint."""
    buckets: tuple[WeightBucket, ...]
    """This rank's buckets: every `world_size`-th one."""
    address: tuple[str, int] | None = None
    """Host and port of this rank's store, where the transport has one."""

    @property
    def num_bytes(self) -> int:
        return sum(bucket.data.nbytes for bucket in self.buckets)


_AS_IN_MEMORY: FileLayout = {}
"""The layout of a model whose tensors are in files as in memory."""


def allocate_memory(num_bytes: int, pinned: bool) -> np.ndarray:
    """Returns uninitialised host memory of this process, (num_bytes,) uint8."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    return memory.numpy()


def in_order(
    parameters: Iterable[NamedTensor],
    dtype: torch.dtype,
    buffers: Iterable[NamedTensor],
    layout: FileLayout,
) -> list[OrderedWeight]:
    """Returns the weights in the order in which they travel: those with the widest elements first.

    Parameters travel in `dtype`, and buffers in their own dtype. Nothing is cast here. vLLM packs
    all of them into one piece of memory, in which each has to begin at a multiple of its elements'
    size.
    """
    weights = []
    for name, tensor in parameters:
        files = files_in(layout, name, tensor)
        weights.append(OrderedWeight(tensor, dtype, files))
    for name, tensor in buffers:
        files = files_in(layout, name, tensor)
        weights.append(OrderedWeight(tensor, tensor.dtype, files))
    return sorted(weights, key=lambda weight: -weight.dtype.itemsize)


@torch.no_grad()
def collect_weights(
    parameters: Iterable[NamedTensor],
    buffers: Iterable[NamedTensor] = (),
    *,
    layout: FileLayout = _AS_IN_MEMORY,
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    allocate: Allocate | None = allocate_memory,
) -> WeightExport:
    """Gathers a model's weights and keeps this rank's share of them; a collective call when there
    are DTensors.

    Every rank takes part in gathering every bucket, so that beside its share a rank holds one
    bucket, twice while it is put together. The fingerprint is taken from the shards before they are
    gathered: it does not depend on the gathering, the buckets or the transport, and so it detects
    errors in them. Raises ValueError for a name twice, no parameter at all, or a DTensor that is
    not cut along whole rows or columns, or whose rows do not fit its tensors of files.

    Args:
        parameters: (Hugging Face name, parameter), in the same order on every rank; full tensors or
            DTensors. Use `named_parameters()`, which lists tied parameters once.
        buffers: (Hugging Face name, buffer), as the parameters. Their values are not cast.
        layout: where the tensors of a checkpoint's files lie in these; see `file_layout`.
        dtype: the rollout engine's dtype; parameters are cast to it before they are gathered.
        rank: this process among the `world_size` processes of a trainer that each export a share.
        version: which update of the policy these weights are.
        bucket_bytes: size at which a bucket is closed; a larger parameter gets a bucket of its own.
        allocate: returns the memory of a bucket. With None nothing is gathered, and the buckets
            have no values.
    """
    fingerprints: dict[str, Tensor | int] = {}
    buckets = []
    weights = in_order(parameters, dtype, buffers, layout)
    groups = _in_buckets(weights, bucket_bytes)
    for index, group in enumerate(groups):
        tensors = []
        files: list[FileTensor] = []
        for weight, own_dtype, own_files in group:
            # `to` takes 1 us to do nothing.
            tensor = weight if weight.dtype == own_dtype else weight.to(own_dtype)
            tensors.append(tensor)
            files += own_files
            for file in own_files:
                if file.name in fingerprints:
                    raise ValueError(
                        f"Parameter {file.name} is exported twice; pass named_parameters(), not a "
                        "state dict."
                    )
                # The ranks take turns, since each may have a copy of all weights.
                turn = len(fingerprints) % world_size
                fingerprints[file.name] = local_fingerprint(file, tensor, rank, turn)
        is_kept = index % world_size == rank
        whole = whole_tensors(tensors, is_kept) if allocate else []
        if is_kept:
            data = np.empty(0, np.uint8)
            if allocate:
                views = _cut(whole, group)
                data = _pack(views, allocate)
                del views
            names = tuple(file.name for file in files)
            shapes = tuple(file.shape for file in files)
            buckets.append(WeightBucket(index, names, shapes, _name(group[0].dtype), data))
        del tensors, whole  # before the next bucket takes memory
    if not fingerprints:
        raise ValueError("There is no parameter to export; pass the model's named_parameters().")
    return WeightExport(
        version=version,
        rank=rank,
        world_size=world_size,
        dtype=_name(dtype),
        num_tensors=len(fingerprints),
        num_buckets=len(groups),
        fingerprints=read_fingerprints(fingerprints),
        buckets=tuple(buckets),
    )


def _cut(whole: Sequence[Tensor], group: Sequence[OrderedWeight]) -> list[Tensor]:
    """Returns the tensors of files that the whole tensors of a bucket's weights hold, as views."""
    views = []
    for tensor, weight in zip(whole, group, strict=True):
        for file in weight.files:
            views.append(file.of(tensor))
    return views


def _in_buckets(weights: Iterable[OrderedWeight], bucket_bytes: int) -> list[list[OrderedWeight]]:
    """Returns the weights of each bucket: neighbours of one dtype that have at most `bucket_bytes`
    together, or one that has more."""
    groups: list[list[OrderedWeight]] = []
    num_bytes = 0  # of the last group
    dtype = None
    for weight in weights:
        own_bytes = weight.tensor.numel() * weight.dtype.itemsize
        if weight.dtype != dtype or num_bytes + own_bytes > bucket_bytes:
            groups.append([])
            num_bytes = 0
            dtype = weight.dtype
        groups[-1].append(weight)
        num_bytes += own_bytes
    return groups


def _name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _pack(tensors: Sequence[Tensor], allocate: Allocate) -> np.ndarray:
    """Copies tensors of one dtype, one after the other, into (bytes,) uint8 host memory."""
    pieces = [tensor.ravel() for tensor in tensors]
    first = pieces[0]
    sizes = [piece.numel() for piece in pieces]
    # Always a copy: the trainer goes on writing into its parameters. One call copies all, since a
    # model has thousands.
    num_bytes = sum(sizes) * first.itemsize
    data = allocate(num_bytes, first.is_cuda)
    values = torch.from_numpy(data).view(first.dtype)
    if first.is_cuda:  # pinned memory, so that the copies queue and are awaited once
        places = values.split(sizes)
        torch._foreach_copy_(places, pieces, non_blocking=True)
        torch.cuda.synchronize()
    else:
        torch.cat(pieces, out=values)
    return data


def buckets_of(exports: Iterable[WeightExport]) -> list[WeightBucket]:
    """Returns the buckets of all exports."""
    buckets: list[WeightBucket] = []
    for export in exports:
        buckets += export.buckets
    return buckets


def iterate_weights(exports: Sequence[WeightExport]) -> Iterator[NamedTensor]:
    """Yields whole parameters and buffers, in the trainer's order, as views of read-only memory."""
    return iterate_buckets(buckets_of(exports))


def iterate_buckets(buckets: Iterable[WeightBucket]) -> Iterator[NamedTensor]:
    """Yields the weights of buckets as `iterate_weights` does."""
    ordered = sorted(buckets, key=lambda bucket: bucket.index)
    for bucket in ordered:
        with warnings.catch_warnings():
            # Buffers in Ray's object store are read-only; nobody writes into these tensors.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            data = torch.from_numpy(np.asarray(bucket.data))
        dtype = getattr(torch, bucket.dtype)
        values = data.view(dtype)
        sizes = [math.prod(shape) for shape in bucket.shapes]
        pieces = values.split(sizes)
        named = zip(bucket.names, pieces, bucket.shapes, strict=True)
        for name, piece, shape in named:
            # Tensor.view first tries to read the shape as a dtype, and so takes twice as long.
            yield name, torch.reshape(piece, shape)
