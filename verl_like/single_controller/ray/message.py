"""Small batches as lists of plain values: Ray sends those without pickling them, which takes longer than the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_like.protocol import DataProto, Part
from verl_like.protocol.wire import WireTensor, to_wire
from verl_like.single_controller.shard import BatchShard, StoredBatch

INLINE_BYTES = 16 * 1024
"""Larger batches travel through the object store; for smaller ones that takes a rank longer than reading a message."""

# A batch: [rows, or None without columns, [name, torch dtype, NumPy dtype, shape, bytes] of each column, meta_info].


def flatten_arguments(arguments: Mapping[Any, Any], seen: dict[int, Any]) -> list[list[Any]]:
    """[key, plain form or None, value or None] of each argument. `seen` remembers the batches of the call's ranks."""
    flat = []
    for key, value in arguments.items():
        plain = _flat_shard(value, seen) if isinstance(value, BatchShard) else None
        flat.append([key, plain, value if plain is None else None])
    return flat


def restore_arguments(flat: list[list[Any]]) -> dict[Any, Any]:
    """The inverse of `flatten_arguments`."""
    return {key: value if plain is None else _restore_shard(plain) for key, plain, value in flat}


def flatten_result(result: Any) -> list[Any]:
    """[plain form or None, result or None]."""
    plain = None
    if isinstance(result, DataProto) and not result.non_tensor_batch and _is_plain(result.meta_info):
        tensors = result.tensors()
        if sum(tensor.nbytes for tensor in tensors.values()) <= INLINE_BYTES:
            columns = _flat_columns({name: to_wire(tensor) for name, tensor in tensors.items()})
            rows = None if result.batch is None else len(result)
            plain = None if columns is None else [rows, columns, result.meta_info]
    return [plain, result if plain is None else None]


def restore_result(flat: list[Any]) -> Any:
    """The inverse of `flatten_result`."""
    plain, result = flat
    if plain is None:
        return result
    rows, columns, meta_info = plain
    return DataProto.from_state(rows, _restore_columns(columns), {}, meta_info)


def _flat_shard(shard: BatchShard, seen: dict[int, Any]) -> list[Any] | None:
    stored = shard.parts[0].payload
    if len(shard.parts) > 1 or shard.positions is not None or not isinstance(stored, StoredBatch):
        return None
    if id(stored) not in seen:
        seen[id(stored)] = _flat_batch(stored)
    batch = seen[id(stored)]
    columns = None if shard.columns is None else list(shard.columns)
    return None if batch is None else [batch, shard.index, shard.count, columns]


def _restore_shard(plain: list[Any]) -> BatchShard:
    (rows, columns, meta_info), index, count, read = plain
    stored = StoredBatch(rows or 0, (), {}, (rows, _restore_columns(columns), {}, meta_info))
    return BatchShard((Part(stored, stored),), index, count, None if read is None else tuple(read))


def _flat_batch(stored: StoredBatch) -> list[Any] | None:
    if stored.segments or not isinstance(stored.rest, tuple):
        return None
    num_rows, wires, arrays, meta_info = stored.rest
    columns = _flat_columns(wires)
    if columns is None or arrays or not _is_plain(meta_info):
        return None
    return [num_rows, columns, meta_info]


def _flat_columns(wires: Mapping[str, WireTensor]) -> list[list[Any]] | None:
    if any(wire.offsets is not None for wire in wires.values()):
        return None
    return [
        [name, wire.dtype, wire.array.dtype.str, list(wire.array.shape), wire.array.tobytes()]
        for name, wire in wires.items()
    ]


def _restore_columns(columns: list[list[Any]]) -> dict[str, WireTensor]:
    # A copy, as bytes are constants: Python has one object for all that hold the same single byte.
    return {
        name: WireTensor(np.frombuffer(bytearray(content), numpy_dtype).reshape(shape), dtype)
        for name, dtype, numpy_dtype, shape, content in columns
    }


def _is_plain(value: Any) -> bool:
    """Whether a value comes out of a message as it went in."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < 1 << 63)
