"""Whole-batch functions beside DataProto: padding to a divisor, folding the batch dimension, collating rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_like.protocol.columns import PAD_COLUMN
from verl_like.protocol.dataproto import DataProto, DataProtoItem
from verl_like.protocol.merge import names
from verl_like.protocol.row_ops import copy_column, deep_equal, is_jagged, jagged_from_lengths, object_array


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Copy of `data` with rows added until `size_divisor` divides their number, and how many were added.

    The added rows wrap around the real ones (0, 1, 2 -> 0, 1, 2, 0, 1, 2, 0, 1) and are True in the bool column
    "is_pad", which is there only if rows were added. Raises ValueError for a batch without rows.
    """
    if size_divisor <= 0:
        raise ValueError(f"pad_dataproto_to_divisor: the divisor must be positive, got {size_divisor}.")
    num_rows = len(data)
    if num_rows == 0:
        raise ValueError("pad_dataproto_to_divisor: the batch has no rows, so there is none to pad with.")
    pad_size = -num_rows % size_divisor
    if pad_size == 0:
        return data.slice(), 0
    padded = data.select_idxs(torch.arange(num_rows + pad_size) % num_rows)
    if padded.batch is None:
        padded.batch = TensorDict({}, batch_size=[num_rows + pad_size])
    is_pad = torch.arange(num_rows + pad_size, device=padded.batch.device) >= num_rows
    if PAD_COLUMN in padded.batch:
        is_pad |= padded.batch[PAD_COLUMN]
    padded.batch[PAD_COLUMN] = is_pad
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Copy of `data` without its last `pad_size` rows, and without the column "is_pad" once no row of it is True.

    Raises ValueError when "is_pad" says that a row to be dropped is a real one.
    """
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"unpad_dataproto: cannot drop {pad_size} of {len(data)} rows.")
    kept = len(data) - pad_size
    result = data.slice(0, kept)
    if data.batch is None or PAD_COLUMN not in data.batch:
        return result
    if not bool(data.batch[PAD_COLUMN][kept:].all()):
        raise ValueError(f"unpad_dataproto: the last {pad_size} rows are not all padding, says column {PAD_COLUMN!r}.")
    assert result.batch is not None
    if not bool(result.batch[PAD_COLUMN].any()):
        result.pop([PAD_COLUMN])
    return result


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Copy with columns (B, ...) folded to (new_batch_size, B / new_batch_size, ...).

    Raises ValueError if it does not divide and for jagged columns, whose second dimension is already the ragged one.
    """
    if new_batch_size <= 0 or len(data) % new_batch_size:
        raise ValueError(f"fold_batch_dim: {len(data)} rows do not divide into {new_batch_size}.")
    group = len(data) // new_batch_size
    return _reshape(data, "fold_batch_dim", 1, (new_batch_size, group))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Copy with the first `batch_dims` dimensions of every column made one: the inverse of `fold_batch_dim`.

    Raises ValueError if the columns differ in these dimensions.
    """
    columns = data.columns()
    shapes = {tuple(column.shape[:batch_dims]) for name, column in columns.items() if not is_jagged(column)}
    if batch_dims < 1 or len(shapes) > 1 or any(len(shape) < batch_dims for shape in shapes):
        found = {name: tuple(column.shape) for name, column in columns.items()}
        raise ValueError(f"unfold_batch_dim: the columns do not share their first {batch_dims} dimensions: {found}.")
    num_rows = int(np.prod(next(iter(shapes), (len(data),))))
    return _reshape(data, "unfold_batch_dim", batch_dims, (num_rows,))


def _reshape(data: DataProto, caller: str, old_dims: int, new_dims: tuple[int, ...]) -> DataProto:
    """Copy with the first `old_dims` dimensions of every column replaced by `new_dims`."""
    jagged = [name for name, column in data.columns().items() if is_jagged(column)]
    if jagged:
        raise ValueError(f"{caller}: {names(jagged)} are jagged and cannot be reshaped; pop or pad them first.")
    return data.map_columns(
        new_dims[0], lambda column: copy_column(column).reshape(new_dims + tuple(column.shape[old_dims:]))
    )


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows back into a batch: collate_fn([data[i] for i in range(len(data))]) equals data.

    Raises ValueError for an empty list and for rows with different columns or meta_info.
    """
    if not items:
        raise ValueError("collate_fn got no rows.")
    first = items[0]
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({} if item.batch is None else dict(item.batch.items()), item.non_tensor_batch) for item in items
    ]
    for index, (tensors, objects) in enumerate(rows):
        differing = (tensors.keys() ^ rows[0][0].keys()) | (objects.keys() ^ rows[0][1].keys())
        if differing:
            raise ValueError(f"collate_fn: rows 0 and {index} do not both have {names(differing)}.")
        if not deep_equal(items[index].meta_info, first.meta_info):
            raise ValueError(f"collate_fn: rows 0 and {index} have different meta_info; they are not of one batch.")
    columns = {}
    for name in rows[0][0]:
        values = [tensors[name] for tensors, _ in rows]
        if name in first.jagged_keys:
            lengths = torch.tensor([len(value) for value in values], device=values[0].device)
            columns[name] = jagged_from_lengths(torch.cat(values), lengths)
        else:
            columns[name] = torch.stack(values)
    arrays = {}
    for name in rows[0][1]:
        arrays[name] = object_array([objects[name] for _, objects in rows])
        template = first.array_templates.get(name)
        if template is not None and (template.dtype != object or template.ndim > 1):
            arrays[name] = np.stack(list(arrays[name])).astype(template.dtype, copy=False)
    batch = None if first.batch is None else TensorDict(columns, batch_size=[len(items)], device=first.batch.device)
    return DataProto(batch, arrays, first.meta_info)
