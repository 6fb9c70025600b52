"""What travels between the driver and the processes of the workers: plain lists and references.

Ray sends plain values (dicts, lists, text, bytes, numbers) without pickling them, which takes
longer than all the rest of a small call. Whatever else stands among them Ray pickles, large arrays
without a copy.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from verl_like.protocol import CallHeader, DataProto, Part
from verl_like.protocol.wire import WireTensor
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.shard import BatchShard

INLINE_BYTES = 16 * 1024
"""Larger arrays go through the object store. Smaller ones are read faster from the message than
from the store."""
_HEADER = struct.Struct("<qdd")  # the fields of CallHeader; Ray sends bytes as they are


@dataclass(frozen=True)
class StoredBatch:
    """A batch as the driver sends it: references to the columns that are in the object store, and
    the rest.

    `segments` are references to lists of packed columns; `locations` says of each stored column in
    which segment and where in its list it is; `rest` is the packed state without the stored
    columns, or a reference to it.
    """

    segments: list[Any]
    locations: dict[str, list[int]]
    rest: Any

    def load(self, timeout: float) -> DataProto:
        references = [self.rest, *self.segments]
        rest, *segments = _get(references, timeout)
        num_rows, small_columns, arrays, meta_info = rest
        columns = dict(small_columns)
        for name, (number, index) in self.locations.items():
            columns[name] = segments[number][index]
        return unpack_state(num_rows, columns, arrays, meta_info)


def pack(value: Any) -> list[Any] | bytes:
    """Returns the form in which a value travels. `unpack` is the inverse.

    A CallHeader becomes bytes, and nothing else does: all else becomes [kind, content]. The
    content of the kinds batch, stored and shard is plain lists. That of the kind value is any
    other value as it is, even if that is bytes.
    """
    if isinstance(value, DataProto):
        return ["batch", pack_state(*value.__getstate__())]
    if isinstance(value, CallHeader):
        return _HEADER.pack(value.num_rows, value.started, value.finished)
    if isinstance(value, StoredBatch):
        return ["stored", [value.segments, value.locations, value.rest]]
    if isinstance(value, BatchShard):
        parts = [[pack(part.header), pack(part.payload)] for part in value.parts]
        columns = None if value.columns is None else list(value.columns)
        # In the order of BatchShard's fields, as `unpack` expects.
        fields = [
            parts,
            value.index,
            value.num_shards,
            columns,
            value.row_numbers,
            value.num_batch_rows,
            value.ordered,
        ]
        return ["shard", fields]
    return ["value", value]


def unpack(packed: list[Any] | bytes) -> Any:
    """Does the inverse of `pack`. Small columns get memory of their own. Nobody may write into
    large ones."""
    if isinstance(packed, bytes):
        return CallHeader(*_HEADER.unpack(packed))
    kind, content = packed
    if kind == "batch":
        return unpack_state(*content)
    if kind == "stored":
        return StoredBatch(*content)
    if kind == "shard":
        packed_parts, *rest = content
        parts = tuple(Part(unpack(header), unpack(payload)) for header, payload in packed_parts)
        return BatchShard(parts, *rest)
    return content


def pack_state(
    num_rows: int | None, tensors: dict[str, WireTensor], arrays: Any, meta_info: Any
) -> list[Any]:
    """Returns the state of a batch (see `Batch.__getstate__`) with packed columns."""
    columns = {name: pack_column(tensor) for name, tensor in tensors.items()}
    return [num_rows, columns, arrays, meta_info]


def unpack_state(
    num_rows: int | None, columns: dict[str, list[Any]], arrays: Any, meta_info: Any
) -> DataProto:
    """Does the inverse of `pack_state`, and makes the batch."""
    tensors = {}
    for name, (dtype, packed_values, packed_offsets) in columns.items():
        values = _unpack_array(packed_values)
        offsets = _unpack_array(packed_offsets)
        tensors[name] = WireTensor(values, dtype, offsets)
    return DataProto.from_state(num_rows, tensors, arrays, meta_info)


def pack_column(column: WireTensor) -> list[Any]:
    """Returns [torch dtype, array, offsets or None]. Arrays of up to INLINE_BYTES become [NumPy
    dtype, shape, bytes]."""
    return [column.dtype, _pack_array(column.array), _pack_array(column.offsets)]


def _pack_array(array: np.ndarray | None) -> Any:
    if array is None or array.nbytes > INLINE_BYTES:
        return array
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _unpack_array(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    dtype, shape, content = packed
    # A copy, as bytes are constants: Python has one object for all that hold the same single byte.
    memory = bytearray(content)
    return np.frombuffer(memory, dtype).reshape(shape)


def fetch(references: Sequence[Any], timeout: float) -> list[Any]:
    """Returns what references and stored batches stand for, in order. Anything else passes through.

    Raises the WorkerError of a call that failed. Raises TimeoutError if one wait takes more than
    `timeout` seconds. There is one wait for all references, and one for each stored batch.
    """
    values = _get(references, timeout)
    for place, value in enumerate(values):
        if isinstance(value, StoredBatch):
            values[place] = value.load(timeout)
        elif isinstance(references[place], ray.ObjectRef):
            values[place] = unpack(value)
    return values


def _get(references: Sequence[Any], timeout: float) -> list[Any]:
    """Returns a new list in which each reference is replaced by its value."""
    values = list(references)
    wanted = [value for value in values if isinstance(value, ray.ObjectRef)]
    if not wanted:
        return values
    try:
        fetched = iter(ray.get(wanted, timeout=timeout))
    except RayTaskError as error:
        if isinstance(error.cause, WorkerError):
            raise error.cause from None
        raise error from None
    except GetTimeoutError:
        raise TimeoutError(
            f"the results of earlier calls, which are the input here, took more than {timeout:g} s"
        ) from None
    for place, value in enumerate(values):
        if isinstance(value, ray.ObjectRef):
            values[place] = next(fetched)
    return values
