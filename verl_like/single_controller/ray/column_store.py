"""The columns that a driver has put into Ray's object store. Each of them is there once, as long as
its tensor lives."""

from dataclasses import dataclass
from typing import Any

import ray
from torch.utils.weak import WeakTensorKeyDictionary

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import write_count
from verl_like.single_controller.ray.message import (
    INLINE_BYTES,
    StoredBatch,
    pack_column,
    pack_state,
)


@dataclass(frozen=True)
class _Column:
    write_count: int
    segment: Any  # reference to a list of packed columns
    index: int


class ColumnStore:
    """Puts batches so that a tensor's bytes leave the driver once.

    The columns of a batch that are not in the store yet become one object, a segment. A tensor is
    known by its identity and torch's counter of in-place writes, so one that was written into is
    put again (torch does not count writes through `.numpy()` or `.data`). An entry goes with its
    tensor, and Ray frees a segment once no entry and no call in flight refers to it.
    """

    def __init__(self) -> None:
        self._columns = WeakTensorKeyDictionary()  # a _Column by the tensor's identity
        self._ray = ""

    def put(self, data: DataProto) -> StoredBatch:
        """Returns references to the columns. Small ones and meta_info are in the result itself.

        Arrays are put anew in each call, because writes into them are not counted.
        """
        context = ray.get_runtime_context()
        # The first driver of every cluster has the same id, and every driver on a node the same
        # node.
        this_ray = context.get_node_id() + context.get_worker_id()
        # References are of no use to another Ray than the one they came from
        if this_ray != self._ray:
            self._columns.clear()
            self._ray = this_ray
        tensors = data.tensors()
        stored: dict[str, _Column] = {}
        for name, tensor in tensors.items():
            column = self._columns.get(tensor)
            if column is not None and column.write_count == write_count(tensor):
                stored[name] = column
        num_rows, fresh, arrays, meta_info = data.__getstate__(left_out=stored)
        num_bytes = sum(wire.array.nbytes for wire in fresh.values())
        if num_bytes > INLINE_BYTES:
            packed = [pack_column(wire) for wire in fresh.values()]
            segment = ray.put(packed)
            for index, name in enumerate(fresh):
                tensor = tensors[name]
                column = _Column(write_count(tensor), segment, index)
                stored[name] = column
                if column.write_count >= 0:  # what has no counter is not remembered
                    self._columns[tensor] = column
            fresh = {}
        rest: Any = pack_state(num_rows, fresh, arrays, meta_info)
        segments = list({column.segment for column in stored.values()})
        locations = {
            name: [segments.index(column.segment), column.index] for name, column in stored.items()
        }
        if arrays:
            rest = ray.put(rest)
        return StoredBatch(segments, locations, rest)


# One for all groups of a driver, which are given the same batch one after the other.
COLUMN_STORE = ColumnStore()
