"""Where the tensors of a checkpoint's files lie in a model's.

transformers converts weights when it loads and saves them: the experts of a layer are one tensor in
a model and single matrices in files, and some names differ. vLLM reads what is in files, so weights
travel under the names and in the shapes of files. What transformers does to a tensor on saving
yields views of it, so a tensor of a file is described by the size and strides of a view.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class FilePart(NamedTuple):
    """Values of a tensor of a file."""

    values: Tensor
    """A view of the tensor in memory."""
    first_row: int
    """Where they begin along the first dimension of the tensor of the file. The others are
    whole."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a checkpoint's files, as a view of a tensor of the model."""

    name: str
    """Its name in files."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """For each dimension how many elements of the tensor in memory, which is contiguous, are
    between neighbours."""
    offset: int
    """How many elements of the tensor in memory are before the first one."""
    shape_in_memory: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True if it is the tensor in memory, at most with another name."""
        return self.shape == self.shape_in_memory and self.stride == _strides(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Returns its values, a view of the whole tensor in memory."""
        if self.is_whole:
            return whole
        assert whole.is_contiguous(), f"{self.name} is cut from a tensor that is not contiguous"
        start = whole.storage_offset() + self.offset
        return whole.as_strided(self.shape, self.stride, start)

    def of_rows(self, rows: Tensor, first: int) -> FilePart | None:
        """Returns its part in some rows of the tensor in memory; None if it has no values there.

        Raises ValueError for a tensor that neither lies in one row nor has whole rows.

        Args:
            rows: indices `first` and following of dimension 0 of the tensor in memory, contiguous.
        """
        row_size = math.prod(self.shape_in_memory[1:])
        extents = [(n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)]
        own_first, start_in_row = divmod(self.offset, row_size)
        start = rows.storage_offset() + start_in_row
        if start_in_row + sum(extents) < row_size:
            index = own_first - first
            if not 0 <= index < len(rows):
                return None
            values = rows.as_strided(self.shape, self.stride, start + index * row_size)
            return FilePart(values, 0)
        if self.stride[0] != row_size or start_in_row + sum(extents[1:]) >= row_size:
            raise ValueError(
                f"{self.name} of the model's files has {self.shape} of {self.shape_in_memory} in "
                "memory, over several rows and in another order, which cannot be cut where the "
                "rows are: train with strategy=ddp or single."
            )
        own_end = own_first + self.shape[0]
        begin = max(first, own_first)
        end = min(first + len(rows), own_end)
        if begin >= end:
            return None
        start += (begin - first) * row_size
        values = rows.as_strided((end - begin, *self.shape[1:]), self.stride, start)
        return FilePart(values, begin - own_first)


FileLayout = Mapping[str, Sequence[FileTensor]]
"""By the name of a model's tensor the tensors of files that it holds. Others are in files as in
memory."""


def files_in(layout: FileLayout, name: str, tensor: Tensor) -> Sequence[FileTensor]:
    """Returns the tensors of files that a model's tensor holds."""
    return layout.get(name) or [_same(name, tensor)]


def each_in_files(
    layout: FileLayout, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[FileTensor, Tensor]]:
    """Yields the tensors of files that a model's weights hold, each with its weight."""
    for name, tensor in weights:
        for file in files_in(layout, name, tensor):
            yield file, tensor


def file_layout(hf: PreTrainedModel) -> dict[str, list[FileTensor]]:
    """Returns where the tensors of files lie in a model's parameters and buffers. The model has no
    adapter.

    A tensor that transformers does not cut into views on saving, for example one that it joins
    with another, is taken to be in files as in memory. It needs no values.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for name, tensor in [*hf.named_parameters(), *hf.named_buffers()]:
        # Of DTensors too the shape is that of the whole.
        twin = torch.empty(tensor.shape, device="meta")
        tensors[name] = twin
        names[_storage(twin)] = name
    # What a model was loaded with is not used: it differs between ranks, of which one loads.
    unloaded = copy(hf)
    unloaded.__dict__.pop("_weight_conversions", None)
    with _KeepsViews():
        converted = revert_weight_conversion(unloaded, dict(tensors))
    found: dict[str, list[FileTensor]] = defaultdict(list)
    for file_name, view in converted.items():
        source = names.get(_storage(view))
        if source is None:
            continue
        file = FileTensor(
            file_name,
            tuple(view.shape),
            view.stride(),
            int(view.storage_offset()),
            tuple(tensors[source].shape),
        )
        found[source].append(file)
    layout = {}
    for name, files in found.items():
        num_elements = sum(math.prod(file.shape) for file in files)
        if num_elements == tensors[name].numel():
            layout[name] = files
    return layout


class _KeepsViews(TorchFunctionMode):
    """Makes `Tensor.contiguous` return its argument, so that what a conversion cuts out of a tensor
    stays a view of it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.contiguous:
            return args[0]
        return function(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    """Returns a number that views of a tensor have in common with it."""
    return int(tensor.untyped_storage()._cdata)


def _same(name: str, tensor: Tensor) -> FileTensor:
    """Returns the tensor of a file that is as in memory."""
    shape = tuple(tensor.shape)
    return FileTensor(name, shape, _strides(shape), 0, shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
