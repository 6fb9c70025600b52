"""The columns of a batch: how they are checked, compared, described, pickled and written to a
file."""

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from verl_like.protocol.row_ops import (
    RowIndices,
    RowTaker,
    check_tensor_column,
    columns_of,
    copied,
    deep_equal,
    is_jagged,
    jagged_parts,
    map_leaves,
    row_indices,
    tensor_dict,
    write_count,
)
from verl_like.protocol.wire import WireTensor, from_wire, read_file, to_wire, write_file

# (number of rows, or None without `batch`; tensors; non_tensor_batch; meta_info)
State = tuple[int | None, dict[str, WireTensor], dict[str, np.ndarray], dict[str, Any]]


def _tensor_to_wire(value: Any) -> Any:
    if isinstance(value, Tensor):
        return to_wire(value)
    return value


def _tensor_from_wire(value: Any) -> Any:
    if isinstance(value, WireTensor):
        return from_wire(value)
    return value


@dataclass(eq=False, repr=False)
class Batch:
    """The columns of some rows: tensors in `batch` (one batch dimension), objects in
    `non_tensor_batch`, and `meta_info`, which is about the batch and not about a row.

    Tensors may be jagged (torch.nested, layout=torch.jagged, ragged in dim 1). Every operation
    makes those whose rows have the same lengths share one offsets tensor, so that torch computes
    between them.

    Containers are never shared between two batches; columns are values: replace them
    (`data.batch["x"] = ...`), never write into them.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()
        if self.batch is not None:
            device = self.batch.device
            self.batch = tensor_dict(self.tensors(), len(self), device)
        self.non_tensor_batch = dict(self.non_tensor_batch)
        self.meta_info = copied(self.meta_info)

    def check_consistency(self) -> None:
        """Raise ValueError unless every column has the same number of rows and a supported type."""
        batch = self.batch
        is_table = isinstance(batch, TensorDict) and batch.batch_dims == 1
        if batch is not None and not is_table:
            raise ValueError(
                f"DataProto.batch is a {type(batch).__name__} with batch_size "
                f"{getattr(batch, 'batch_size', None)}; it must be a TensorDict with one "
                "batch dimension, as DataProto.from_dict makes it."
            )
        for given in (self.non_tensor_batch, self.meta_info):
            if not isinstance(given, dict):
                raise ValueError(
                    "DataProto.non_tensor_batch and DataProto.meta_info must be dicts."
                )
        for name, tensor in self.tensors().items():
            check_tensor_column(f"DataProto.batch[{name!r}]", tensor)
        wrong = {}
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise ValueError(
                    f"DataProto.non_tensor_batch[{name!r}] is a {type(array).__name__}, not an "
                    "array with rows; give an array or, to DataProto.from_dict(non_tensors=...), "
                    "a list with one element per row."
                )
            if len(array) != len(self):
                wrong[name] = len(array)
        if wrong:
            raise ValueError(
                f"DataProto has {len(self)} rows but non_tensor_batch has columns with another "
                f"number: {wrong}; every column must have the same number of rows."
            )

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        for array in self.non_tensor_batch.values():
            return len(array)
        return 0

    @property
    def tensor_batch(self) -> TensorDict:
        """Returns `batch` of a batch that is known to have tensors."""
        assert self.batch is not None, "this batch has no tensors"
        return self.batch

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensor columns by name, as a new dict. It is empty if there is no `batch`."""
        if self.batch is None:
            return {}
        return columns_of(self.batch)

    def columns(self) -> dict[str, Any]:
        """Returns tensor columns and arrays by name, as a new dict."""
        return {**self.tensors(), **self.non_tensor_batch}

    def with_columns(
        self,
        num_rows: int,
        tensors: Mapping[str, Tensor],
        arrays: dict[str, np.ndarray],
        meta_info: dict[str, Any],
    ) -> Self:
        """Returns a batch of columns that fit, on this one's device. They are not checked.

        It has no `batch` if this one has none.
        """
        data = type(self).__new__(type(self))
        data.batch = None
        if self.batch is not None:
            data.batch = tensor_dict(tensors, num_rows, self.batch.device)
        data.non_tensor_batch = arrays
        data.meta_info = copied(meta_info)
        return data

    def map_columns(self, num_rows: int, operation: Callable[[Any], Any]) -> Self:
        """Returns the same columns and meta_info after `operation` was done on every column, which
        then has `num_rows` rows."""
        # The containers are open: a column of another length may have been put in
        self.check_consistency()
        tensors = {name: operation(column) for name, column in self.tensors().items()}
        arrays = {name: operation(array) for name, array in self.non_tensor_batch.items()}
        return self.with_columns(num_rows, tensors, arrays, self.meta_info)

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Returns a copy of the rows start:end:step, with Python's rules for slices."""
        rows = range(len(self))[start:end:step]
        return self.select_idxs(list(rows))

    def select_idxs(self, idxs: RowIndices) -> Self:
        """Returns a copy of the rows at `idxs`.

        These are integers, which may be negative to count from the end and may occur several times,
        or one bool per row.
        """
        indices = row_indices(idxs, len(self))
        return self.map_columns(len(indices), RowTaker(indices))

    def equal(self, other: "Batch") -> bool:
        """Returns True if columns, dtypes, values and meta_info are the same.

        NaN equals NaN. Neither the device nor the order of columns counts.
        """
        return (
            len(self) == len(other)
            and deep_equal(self.tensors(), other.tensors())
            and deep_equal(self.non_tensor_batch, other.non_tensor_batch)
            and deep_equal(self.meta_info, other.meta_info)
        )

    def column_versions(self) -> dict[str, int]:
        """Returns the `write_count` of each tensor column. A column was written into in place if
        its count has changed."""
        return {name: write_count(tensor) for name, tensor in self.tensors().items()}

    def get_data_info(self) -> str:
        """Describes the batch for people: one line per column with shape, dtype and size."""
        lines = [f"DataProto: {len(self)} rows"]
        total = 0
        for name, tensor in self.tensors().items():
            values = tensor
            if is_jagged(tensor):
                values, _ = jagged_parts(tensor)
            total += values.nbytes
            described = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            lines.append(f"  {name}: {described}, {values.nbytes / 2**20:.2f} MiB")
        for name, array in self.non_tensor_batch.items():
            total += array.nbytes
            lines.append(f"  {name}: {array.shape} array of {array.dtype}")
        for name, value in self.meta_info.items():
            lines.append(f"  meta_info[{name!r}]: {type(value).__name__}")
        lines[0] += f", {total / 2**20:.2f} MiB"
        return "\n".join(lines)

    __repr__ = get_data_info

    def __getstate__(self, left_out: Container[str] = ()) -> State:
        """Returns the state. A caller that sends some tensors another way gives their names as
        `left_out`.

        The others become NumPy arrays on the same memory, which pickle protocol 5 passes on out of
        band, without a copy. Tensors of a GPU are copied to the CPU, and non-contiguous ones are
        made contiguous.
        """
        self.check_consistency()
        tensors = {}
        for name, tensor in self.tensors().items():
            if name not in left_out:
                tensors[name] = to_wire(tensor)
        meta_info = map_leaves(_tensor_to_wire, self.meta_info)
        num_rows = None if self.batch is None else len(self)
        return num_rows, tensors, dict(self.non_tensor_batch), meta_info

    def __setstate__(self, state: State) -> None:
        """Takes the state over. Its tensors are on the CPU, wherever they were before, and may lie
        in shared memory: nobody may write into them."""
        num_rows, tensors, self.non_tensor_batch, meta_info = state
        self.batch = None
        if num_rows is not None:
            columns = {name: from_wire(tensor) for name, tensor in tensors.items()}
            self.batch = tensor_dict(columns, num_rows)
        self.meta_info = map_leaves(_tensor_from_wire, meta_info)

    @classmethod
    def from_state(cls, *state: Any) -> Self:
        """Returns the batch that has this `__getstate__`."""
        data = cls.__new__(cls)
        data.__setstate__(state)
        return data

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to one safetensors file, without pickle. Raises ValueError, which names
        the value, for a value of an unknown type."""
        self.check_consistency()
        contents = {
            "rows": None if self.batch is None else len(self),
            "batch": self.tensors(),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }
        write_file(path, contents)

    @classmethod
    def load_from_disk(cls, path: str | os.PathLike[str]) -> Self:
        """Returns a batch that `save_to_disk` wrote, on the CPU."""
        contents = read_file(path)
        num_rows = contents["rows"]
        batch = None
        if num_rows is not None:
            batch = tensor_dict(contents["batch"], num_rows)
        return cls(batch, contents["non_tensor_batch"], contents["meta_info"])
