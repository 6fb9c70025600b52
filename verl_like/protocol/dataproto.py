"""DataProto, the batch that travels between the driver and the workers."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl_like.protocol import merge, row_ops
from verl_like.protocol.compat import VerlDataProto


@dataclass(eq=False)
class DataProtoItem:
    """One row: `batch` holds its tensors (no batch dimension), `non_tensor_batch` its objects."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto(VerlDataProto):
    """A batch, see `Batch`, with the methods by which batches are made, split, joined and combined.

    Operations on rows (indexing, chunk, repeat, concat, ...) copy the rows, though not what the
    elements of object arrays refer to; `select` and `union` share the columns.
    """

    @staticmethod
    def from_dict(
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> "DataProto":
        """Makes a batch of columns by name. A list or tuple of non-tensors becomes a 1-D object
        array, one element per row."""
        batch = None
        if tensors:
            sizes = {}
            for name, tensor in tensors.items():
                row_ops.check_tensor_column(f"from_dict: tensors[{name!r}]", tensor)
                sizes[name] = tensor.size(0)
            num_rows, *others = set(sizes.values())
            if others:
                raise ValueError(f"from_dict: the tensors differ in their number of rows: {sizes}.")
            batch = row_ops.tensor_dict(tensors, num_rows)
        arrays: dict[str, Any] = dict(non_tensors or {})
        for name, value in arrays.items():
            if isinstance(value, (list, tuple)):
                arrays[name] = row_ops.object_array(value)
        return DataProto(batch, arrays, meta_info or {})

    @staticmethod
    def from_single_dict(
        data: Mapping[str, Any], meta_info: dict[str, Any] | None = None
    ) -> "DataProto":
        """Makes a batch of tensors, which go to `batch`, and NumPy arrays, which go to
        `non_tensor_batch`. Raises ValueError for anything else."""
        tensors = {}
        arrays = {}
        for name, value in data.items():
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                arrays[name] = value
        batch = DataProto.from_dict(tensors).batch
        return DataProto(batch, arrays, meta_info or {})

    @overload
    def __getitem__(self, index: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: slice | row_ops.RowIndices) -> "DataProto": ...
    def __getitem__(self, index: Any) -> Any:
        """Returns a row as DataProtoItem for an integer, and otherwise a DataProto of copied
        rows."""
        is_integer = isinstance(index, (int, np.integer))
        if is_integer and not isinstance(index, bool):
            row = self.select_idxs([int(index)])
            batch = None
            if row.batch is not None:
                batch = row.batch[0]
            elements = {name: array[0] for name, array in row.non_tensor_batch.items()}
            return DataProtoItem(batch, elements, row.meta_info)
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, (list, tuple, np.ndarray, Tensor)):
            return self.select_idxs(index)
        raise TypeError(
            "DataProto is indexed by an int, a slice, a list, an array or a tensor, not "
            f"{type(index).__name__}."
        )

    def rows(self, start: int, stop: int) -> "DataProto":
        """Returns the rows start to stop - 1 as a VIEW of the same memory. It is for code that only
        moves rows; other code uses `slice`."""
        if self.columns() and not 0 <= start <= stop <= len(self):
            raise ValueError(f"rows({start}, {stop}) is not a range of the {len(self)} rows.")
        view = functools.partial(row_ops.view_rows, start=start, stop=stop)
        return self.map_columns(stop - start, view)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeats every row `repeat_times` times: AABB if `interleave`, and otherwise ABAB."""
        if repeat_times < 0:
            raise ValueError(f"repeat: repeat_times must not be negative, got {repeat_times}.")
        rows = torch.arange(len(self))
        if interleave:
            repeated = rows.repeat_interleave(repeat_times)
        else:
            repeated = rows.repeat(repeat_times)
        return self.select_idxs(repeated)

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Returns the rows of all parts, one part after the other. A part without rows adds only
        its meta_info.

        meta_info is merged by key: "metrics" by `merge_metrics`, "timing" (seconds by name) into
        lists, anything else must be equal wherever it is present. Raises ValueError for an empty
        list, and for columns or meta_info that differ.
        """
        if not data:
            raise ValueError("concat got an empty list; there is no batch to return.")
        meta_infos = [part.meta_info for part in data]
        meta_info = merge.merge_meta_info(meta_infos)
        for part in data:
            part.check_consistency()
        filled = [part for part in data if len(part)]
        if not filled:
            with_columns = [part for part in data if part.columns()]
            filled = with_columns[:1] or [data[0]]
        tensors_of_parts = [part.tensors() for part in filled]
        tensors = merge.concat_parts("batch", tensors_of_parts)
        arrays_of_parts = [part.non_tensor_batch for part in filled]
        arrays = merge.concat_parts("non_tensor_batch", arrays_of_parts)
        num_rows = sum(map(len, filled))
        return filled[0].with_columns(num_rows, tensors, arrays, meta_info)

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Returns a new DataProto with these keys, which shares the columns. None keeps all keys.

        Raises ValueError naming a key that does not exist.
        """
        self.check_consistency()
        tensors = merge.pick_keys("select", "batch", self.tensors(), batch_keys)
        arrays = merge.pick_keys(
            "select", "non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys
        )
        meta = merge.pick_keys("select", "meta_info", self.meta_info, meta_info_keys)
        return self.with_columns(len(self), tensors, arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Removes these keys in place and returns them as a DataProto. None removes nothing. A
        result without columns has no rows.

        Raises ValueError naming a key that does not exist, and then removes nothing.
        """
        tensors = merge.pick_keys("pop", "batch", self.tensors(), batch_keys or ())
        arrays = merge.pick_keys(
            "pop", "non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys or ()
        )
        meta = merge.pick_keys("pop", "meta_info", self.meta_info, meta_info_keys or ())
        result = DataProto.from_dict(tensors, arrays, meta)
        if tensors:
            self.batch = self.tensor_batch.exclude(*tensors)
        # New dicts, because others may hold these ones.
        self.non_tensor_batch = dict(self.non_tensor_batch)
        self.meta_info = dict(self.meta_info)
        for name in arrays:
            del self.non_tensor_batch[name]
        for name in meta:
            del self.meta_info[name]
        return result

    def to(self, device: str | torch.device | int) -> "DataProto":
        """Moves the tensors in place and returns self. Non-tensors stay."""
        if self.batch is None:
            return self
        moved = self.batch.to(torch.device(device))
        columns = row_ops.columns_of(moved)
        self.batch = row_ops.tensor_dict(columns, len(self), moved.device)
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Returns a new DataProto with the columns and meta_info of both, which shares the columns.

        What both have must be equal (NaN equals NaN); the meta_info entries "metrics" and "timing"
        are joined name by name. Raises ValueError naming the key that differs, or when the numbers
        of rows differ.
        """
        both_have_columns = all(
            data.batch is not None or data.non_tensor_batch for data in (self, other)
        )
        num_rows = len(self)
        num_others = len(other)
        if both_have_columns and num_rows != num_others:
            raise ValueError(
                f"union: {num_rows} rows and {num_others} rows; select the same rows of both first."
            )
        batch = self.batch
        if batch is None:
            batch = other.batch
        elif other.batch is not None:
            batch = merge.union_tensor_dict(batch, other.batch)
        arrays = merge.union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        meta_info = merge.union_meta_info(self.meta_info, other.meta_info)
        return DataProto(batch, arrays, meta_info)
