"""Whole-batch functions beside DataProto: padding to a divisor, folding the batch dimension."""

import math
from typing import Any

import torch
from tensordict import TensorDict

from verl_like.protocol.columns import PAD_COLUMN
from verl_like.protocol.dataproto import DataProto
from verl_like.protocol.merge import names
from verl_like.protocol.row_ops import is_jagged


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Returns a copy of `data` with rows added until `size_divisor` divides their number, and the
    number of added rows.

    The added rows wrap around the real ones (0, 1, 2 -> 0, 1, 2, 0, 1, 2, 0, 1) and are True in
    the bool column "is_pad", which a batch gets only if rows are added. Raises ValueError for a
    batch without rows.
    """
    if size_divisor <= 0:
        raise ValueError(
            f"pad_dataproto_to_divisor: the divisor must be positive, got {size_divisor}."
        )
    num_rows = len(data)
    if num_rows == 0:
        raise ValueError(
            "pad_dataproto_to_divisor: the batch has no rows, so there is none to pad with."
        )
    pad_size = -num_rows % size_divisor
    if pad_size == 0:
        return data.slice(), 0
    num_padded = num_rows + pad_size
    padded = data.select_idxs(torch.arange(num_padded) % num_rows)
    if padded.batch is None:
        padded.batch = TensorDict({}, batch_size=[num_padded])
    is_pad = torch.arange(num_padded, device=padded.batch.device) >= num_rows
    if PAD_COLUMN in padded.batch:
        is_pad |= padded.batch[PAD_COLUMN]
    padded.batch[PAD_COLUMN] = is_pad
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Returns a copy of `data` without its last `pad_size` rows.

    The column "is_pad" goes as well once no row of it is True.

    Raises ValueError when "is_pad" says that a row to be dropped is a real one.
    """
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"unpad_dataproto: cannot drop {pad_size} of {len(data)} rows.")
    num_kept = len(data) - pad_size
    is_pad = data.tensors().get(PAD_COLUMN)
    result = data.slice(0, num_kept)
    if is_pad is None:
        return result
    if not bool(is_pad[num_kept:].all()):
        raise ValueError(
            f"unpad_dataproto: the last {pad_size} rows are not all padding, says column "
            f"{PAD_COLUMN!r}."
        )
    if not bool(is_pad[:num_kept].any()):
        result.pop([PAD_COLUMN])
    return result


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Returns a copy with columns (B, ...) folded to (new_batch_size, B / new_batch_size, ...).

    Raises ValueError if it does not divide, and for jagged columns.
    """
    if new_batch_size <= 0 or len(data) % new_batch_size:
        raise ValueError(f"fold_batch_dim: {len(data)} rows do not divide into {new_batch_size}.")
    new_dims = (new_batch_size, len(data) // new_batch_size)
    return _reshape(data, "fold_batch_dim", 1, new_dims)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Returns a copy with the first `batch_dims` dimensions of every column made one. It is the
    inverse of `fold_batch_dim`.

    Raises ValueError if the columns differ in these dimensions, and for jagged columns.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, column in data.columns().items():
        shapes[name] = tuple(column.shape[:batch_dims])
    differ = len(set(shapes.values())) > 1
    too_few = any(len(shape) < batch_dims for shape in shapes.values())
    if batch_dims < 1 or differ or too_few:
        raise ValueError(
            f"unfold_batch_dim: the columns do not share their first {batch_dims} dimensions: "
            f"{shapes}."
        )
    first_shape = next(iter(shapes.values()), (len(data),))
    num_rows = math.prod(first_shape)
    return _reshape(data, "unfold_batch_dim", batch_dims, (num_rows,))


def _reshape(data: DataProto, caller: str, old_dims: int, new_dims: tuple[int, ...]) -> DataProto:
    """Returns a copy with the first `old_dims` dimensions of every column replaced by
    `new_dims`."""
    jagged = [name for name, column in data.columns().items() if is_jagged(column)]
    if jagged:
        raise ValueError(
            f"{caller}: {names(jagged)} are jagged and cannot be reshaped; pop or pad them first."
        )

    def reshape(column: Any) -> Any:
        return column.reshape(*new_dims, *column.shape[old_dims:])

    return data.slice().map_columns(new_dims[0], reshape)
