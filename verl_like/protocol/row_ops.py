"""Operations on the rows of one column, which is a tensor, a jagged tensor or a NumPy array. Rows
are the first dimension."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

ColumnData = Tensor | np.ndarray
_HUGE_PAGE = 2 * 1024 * 1024
RowIndices = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Returns False for torch's advice to those who trace a model with torch.fx.

    `jagged_from_offsets` makes torch log it once in each process, and nothing here traces a model
    so.
    """
    return not record.getMessage().startswith("is_fx_tracing will return true for both")


logging.getLogger("torch.fx._symbolic_trace").addFilter(_is_worth_telling)


def is_jagged(column: ColumnData) -> TypeGuard[Tensor]:
    # The class is asked for first: torch takes 10 us for any property of a jagged tensor.
    if isinstance(column, NestedTensor):
        return True
    if not isinstance(column, Tensor):
        return False
    return column.is_nested


def check_tensor_column(place: str, column: Any) -> None:
    """Raises ValueError, which names the place, unless `column` is a tensor with rows, strided or
    ragged in dim 1."""
    if not isinstance(column, Tensor) or column.ndim == 0:
        raise ValueError(
            f"{place} is a {type(column).__name__}, not a tensor with rows; put it in "
            "non_tensor_batch, one value per row, or in meta_info."
        )
    if not column.is_nested:
        return
    if column.layout != torch.jagged:
        raise ValueError(
            f"{place} is a nested tensor of layout {column.layout}; make it with "
            "layout=torch.jagged."
        )
    ragged_dim = cast(Any, column)._ragged_idx
    if ragged_dim != 1:
        raise ValueError(
            f"{place} is ragged in dim {ragged_dim}; transpose it to (rows, ragged, ...)."
        )


def jagged_parts(column: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values (sum of lengths, ...) and the offsets (B + 1,) of a jagged tensor (B,
    ragged, ...).

    They are views of it if it is contiguous.
    """
    parts = cast(NestedTensor, column)
    values = parts._values
    has_holes = parts._lengths is not None
    is_simple = values.is_contiguous() and not values.requires_grad
    if is_simple and not has_holes:
        return values, parts._offsets  # a thirtieth of the time of what follows
    whole: Any = column.contiguous()  # closes the holes that torch.nested.narrow leaves
    return whole.values(), whole.offsets()


def offsets_of(lengths: Tensor) -> Tensor:
    """Returns where each row begins in the values, and the end of the last one: (B + 1,) int64.

    `lengths` are those of the rows (B,).
    """
    offsets = lengths.new_zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def row_lengths(column: Tensor) -> Tensor:
    """Returns the number of values of each row of a jagged column, (B,) int64."""
    _values, offsets = jagged_parts(column)
    return offsets.diff()


def places_from(starts: Tensor, offsets: Tensor) -> Tensor:
    """Returns the place of each value of jagged rows if the rows begin at `starts` (B,), int64."""
    shift_of_row = starts - offsets[:-1]
    shift = torch.repeat_interleave(shift_of_row, offsets.diff())
    return shift.add_(torch.arange(len(shift), device=shift.device))


def jagged_from_lists(rows: Sequence[Sequence[Any] | np.ndarray], dtype: torch.dtype) -> Tensor:
    """Makes a jagged tensor of rows of numbers."""
    num_values = [len(row) for row in rows]
    lengths = torch.tensor(num_values, dtype=torch.int64)
    array = _joined(rows, dtype)
    values = torch.from_numpy(array).to(dtype)
    return jagged_from_lengths(values, lengths)


def jagged_from_arrays(rows: Sequence[np.ndarray]) -> Tensor:
    """Makes a jagged tensor of the arrays of its rows, (length, ...) each, in their dtype."""
    lengths = torch.tensor([len(row) for row in rows])
    values = np.concatenate(rows)
    return jagged_from_lengths(torch.from_numpy(values), lengths)


def _joined(rows: Sequence[Any], dtype: torch.dtype) -> np.ndarray:
    """Returns the numbers of all rows, which become ones of a dtype, in one array."""
    are_arrays = all(isinstance(row, np.ndarray) for row in rows)
    if rows and are_arrays:
        return np.concatenate(rows)
    numbers = itertools.chain.from_iterable(rows)
    if dtype.is_floating_point:
        return np.fromiter(numbers, np.float64)
    return np.fromiter(numbers, np.int64)


def jagged_on_last_token(values_B: Tensor, mask: Tensor) -> Tensor:
    """Puts one value per row (B,) on the row's last token of the mask.

    Returns a jagged column by response token, which is 0 elsewhere. The value of a row without a
    token in the mask is lost.
    """
    marks, offsets = jagged_parts(mask)
    row_of_token = torch.repeat_interleave(offsets.diff())
    marked = marks.bool().nonzero().squeeze(1)  # where, among the values of all rows
    row_of_marked = row_of_token[marked]
    # The largest place is the last one. A row without any keeps -1.
    none_B = torch.full((len(values_B),), -1)
    last_B = none_B.scatter_reduce(0, row_of_marked, marked, "amax")
    has_token_B = last_B >= 0
    column = values_B.new_zeros(len(marks))
    column[last_B[has_token_B]] = values_B[has_token_B]
    return jagged_from_offsets(column, offsets)


def jagged_from_offsets(values: Tensor, offsets: Tensor) -> Tensor:
    """Makes a jagged tensor of its values and offsets. It is the inverse of `jagged_parts`."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def jagged_from_lengths(values: Tensor, lengths: Tensor) -> Tensor:
    """Makes a jagged tensor of its values and the lengths of its rows (B,)."""
    offsets = offsets_of(lengths)
    return jagged_from_offsets(values, offsets)


def share_offsets(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the columns; jagged ones with rows of the same lengths share one offsets tensor, that
    of the first.

    torch computes only between jagged tensors that share it. A column that shares it already stays
    the same tensor.
    """
    known: list[Tensor] = []
    shared = dict(columns)
    for name, column in columns.items():
        if is_jagged(column):
            shared[name] = _on_offsets(column, known)
    return shared


def tensor_dict(
    columns: Mapping[str, Tensor], num_rows: int, device: torch.device | None = None
) -> TensorDict:
    """Makes a TensorDict of columns of `num_rows` rows, of which the jagged ones share offsets.

    With a device, it moves its columns there.
    """
    shared = share_offsets(columns)
    return TensorDict(shared, batch_size=[num_rows], device=device)


def columns_of(table: TensorDict) -> dict[str, Tensor]:
    """Returns the columns of a TensorDict by name, as a new dict."""
    columns: Any = dict(table.items())
    return columns


def _on_offsets(column: Tensor, known: list[Tensor]) -> Tensor:
    """Returns the jagged column with those of the known offsets that equal its own.

    If there are none, its own offsets become known.
    """
    values, offsets = jagged_parts(column)
    for each in known:
        if each is offsets:
            return column
        # On the meta device there are no values to compare.
        are_comparable = each.device == offsets.device and not offsets.is_meta
        if are_comparable and torch.equal(each, offsets):
            return jagged_from_offsets(values, each)
    known.append(offsets)
    has_holes = cast(Any, column).lengths() is not None
    if has_holes:
        return jagged_from_offsets(values, offsets)
    return column


def write_count(tensor: Tensor) -> int:
    """Returns torch's counter of in-place writes, which a jagged tensor shares with its values.

    It is -1 for inference-mode tensors, which have none. torch does not count writes through
    `.numpy()` and `.data`.
    """
    if tensor.is_inference():
        return -1
    return tensor._version


def view_rows(column: ColumnData, start: int, stop: int) -> ColumnData:
    """Returns the rows start to stop - 1 as a view of the same memory."""
    if not is_jagged(column):
        return column[start:stop]
    values, offsets = jagged_parts(column)
    row_offsets = offsets[start : stop + 1]
    first = int(row_offsets[0])
    end = int(row_offsets[-1])
    row_values = values[first:end]
    return jagged_from_offsets(row_values, row_offsets - first)


def row_indices(idxs: RowIndices, num_rows: int) -> Tensor:
    """Returns indices or a mask of bools as int64 on CPU, each in 0..num_rows-1. Negative indices
    count from the end.

    Raises IndexError outside the rows, ValueError for a mask of another length and for other types
    and shapes.
    """
    if isinstance(idxs, (list, tuple)):
        idxs = np.asarray(idxs)  # torch is slow with lists
    indices = torch.as_tensor(idxs).cpu()
    if indices.ndim != 1:
        raise ValueError(
            f"select_idxs: the indices must be one-dimensional, got shape {tuple(indices.shape)}."
        )
    if indices.dtype == torch.bool:
        if len(indices) != num_rows:
            raise ValueError(f"select_idxs: a mask of {len(indices)} values for {num_rows} rows.")
        return indices.nonzero().squeeze(1)
    if len(indices) == 0:
        return torch.zeros(0, dtype=torch.int64)
    if indices.is_floating_point() or indices.is_complex():
        raise ValueError(
            f"select_idxs: the indices must be integers or bools, got {indices.dtype}."
        )
    indices = indices.to(torch.int64)
    low = int(indices.min())
    high = int(indices.max())
    if low < -num_rows or high >= num_rows:
        raise IndexError(f"select_idxs: indices {low}..{high} are outside the {num_rows} rows.")
    is_from_end = indices < 0
    from_start = indices + num_rows
    return torch.where(is_from_end, from_start, indices)


class RowTaker:
    """Copies the rows `indices` (int64 on CPU) of columns; a row may occur several times.

    Jagged columns that share their offsets share the copies' offsets, too.
    """

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self._jagged: list[tuple[Tensor, Tensor, Tensor]] = []
        """Offsets of jagged columns; where in their values the copies' values lie; the offsets of
        the copies."""

    def __call__(self, column: ColumnData) -> ColumnData:
        if isinstance(column, np.ndarray):
            return column[self.indices.numpy()]
        return self.tensor(column)

    def tensor(self, column: Tensor) -> Tensor:
        """Copies rows of a tensor."""
        if not column.is_nested:
            indices = self.indices.to(column.device)
            memory = _empty(column, len(indices))
            rows = column.detach()
            # Whole rows at a time, twice as fast as column[indices].
            return torch.index_select(rows, 0, indices, out=memory)
        values, offsets = jagged_parts(column)
        places, new_offsets = self._of_jagged(offsets)
        taken = values.detach().index_select(0, places)
        return jagged_from_offsets(taken, new_offsets)

    def _of_jagged(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        for known, places, new_offsets in self._jagged:
            if known is offsets:
                return places, new_offsets
        indices = self.indices.to(offsets.device)
        lengths = offsets.diff()[indices]
        new_offsets = offsets_of(lengths)
        places = places_from(offsets[indices], new_offsets)
        self._jagged.append((offsets, places, new_offsets))
        return places, new_offsets


def concat_columns(name: str, parts: Sequence[Any]) -> ColumnData:
    """Returns the rows of all parts in new memory, one part after the other. Raises ValueError,
    which names the column, if they do not match."""
    first = parts[0]
    expected = _signature(first)
    for index, part in enumerate(parts):
        found = _signature(part)
        if found != expected:
            raise ValueError(
                f"concat: column {name!r} is {expected} in part 0 but {found} in part {index}; "
                "give every part the same type and width (pad to a common width, or use a jagged "
                "column)."
            )
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if first.is_nested:
        return _concat_jagged(parts)
    num_rows = sum(map(len, parts))
    memory = _empty(first, num_rows)
    detached = [part.detach() for part in parts]
    return torch.cat(detached, out=memory)


def _concat_jagged(parts: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all parts, which are jagged tensors."""
    all_values = []
    all_lengths = []
    for part in parts:
        values, offsets = jagged_parts(part)
        all_values.append(values)
        lengths = offsets.diff()
        all_lengths.append(lengths)
    values = torch.cat(all_values)
    lengths = torch.cat(all_lengths)
    return jagged_from_lengths(values, lengths)


def _empty(like: Tensor, num_rows: int) -> Tensor | None:
    """Returns uninitialised memory for a large column of `num_rows` rows. It is None if torch may
    as well allocate the memory itself.

    NumPy asks the system for huge pages, which torch does not: new memory of some megabytes is
    filled four to ten times as fast.
    """
    shape = (num_rows, *like.shape[1:])
    num_bytes = math.prod(shape) * like.element_size()
    is_small = num_bytes < _HUGE_PAGE
    if is_small or like.device.type != "cpu":
        return None
    memory = np.empty(num_bytes, dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)


def _signature(column: ColumnData) -> str:
    """Says in words what must agree for two columns to be concatenated."""
    if isinstance(column, np.ndarray):
        dtype = str(column.dtype)
        if column.dtype.kind == "U":  # NumPy widens strings without loss
            dtype = "str"
        return f"an array of {dtype} with rows of shape {column.shape[1:]}"
    if column.is_nested:
        values, _ = jagged_parts(column)
        shape = tuple(values.shape[1:])
        return f"a jagged tensor of {column.dtype} with row entries of shape {shape}"
    shape = tuple(column.shape[1:])
    return f"a tensor of {column.dtype} with rows of shape {shape}"


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Returns a 1-D object array with one element per row. np.array would turn equally long lists
    into a second dimension."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def deep_equal(left: Any, right: Any) -> bool:
    """Compares by value. NaN equals NaN, dtype and shape count, and tensors and arrays may be
    nested in containers."""
    if left is right:
        return True
    for kind in (Tensor, np.ndarray):
        is_left = isinstance(left, kind)
        is_right = isinstance(right, kind)
        if is_left and is_right:
            return _columns_equal(left, right)
        if is_left or is_right:
            return False
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return False
        return all(deep_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        if len(left) != len(right):
            return False
        return all(map(deep_equal, left, right))
    if dataclasses.is_dataclass(left) and type(left) is type(right):
        for field in dataclasses.fields(left):
            left_value = getattr(left, field.name)
            right_value = getattr(right, field.name)
            if not deep_equal(left_value, right_value):
                return False
        return True
    if left == right:
        return True
    both_nan = left != left and right != right
    return bool(both_nan)


def _columns_equal(left: Any, right: Any) -> bool:
    """Compares two tensors or two arrays."""
    if left.dtype != right.dtype:
        return False
    ragged = is_jagged(left)
    if ragged != is_jagged(right):
        return False
    if ragged:
        left_values, left_offsets = jagged_parts(left)
        right_values, right_offsets = jagged_parts(right)
        if not _columns_equal(left_offsets, right_offsets):
            return False
        return _columns_equal(left_values, right_values)
    if left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(deep_equal, left.flat, right.flat))
    if isinstance(left, Tensor):
        right = right.to(left.device)
    left_nan = left != left
    right_nan = right != right
    both_nan = left_nan & right_nan
    same = (left == right) | both_nan
    return bool(same.all())


def copied(containers: Any) -> Any:
    """Returns a copy of nested dicts, lists and tuples, which share whatever else they hold."""
    return map_leaves(lambda leaf: leaf, containers)


def map_leaves(operation: Callable[[Any], Any], value: Any) -> Any:
    """Returns a copy of nested dicts, lists and tuples after `operation` was done on whatever else
    they hold."""
    kind = type(value)
    if isinstance(value, dict):
        return {key: map_leaves(operation, item) for key, item in value.items()}
    if kind in (list, tuple):
        items = [map_leaves(operation, item) for item in value]
        return kind(items)
    return operation(value)
