"""The share of a batch that one rank works on, described by references and resolved on the worker."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_like.protocol import PAD_COLUMN, DataProto, DataProtoFuture, Part

# Turns references into values, in order; anything that is not a reference of the backend passes through.
Fetch = Callable[[list[Any]], list[Any]]
RowNumbers = Sequence[int] | np.ndarray | torch.Tensor


class Ordered:
    """A batch of which rank i of a group gets the i-th equal slice of `order`, instead of the i-th slice of its rows.

    The result comes back in the batch's own order. The batch itself is not copied: each rank gathers its rows.

    Args:
        batch: or the future of one.
        order: (rows,) the row numbers of the batch, each of them once.

    Raises:
        ValueError: `order` is not a permutation of the rows.
    """

    def __init__(self, batch: DataProto | DataProtoFuture, order: RowNumbers) -> None:
        self.batch = batch
        self.order = np.asarray(order, dtype=np.int64)
        # Of a future, only one whose ranks worked in another order says how many rows it has.
        known = batch if isinstance(batch, DataProto) else self.order if batch.order is None else batch.order
        rows = len(known)
        if self.order.shape != (rows,) or not np.array_equal(np.sort(self.order), np.arange(rows)):
            raise ValueError(
                f"the order of an Ordered batch names each of its {rows} rows once, got {self.order.shape} numbers: "
                f"{self.order[:20].tolist()}"
            )


@dataclass(frozen=True)
class StoredBatch:
    """A batch as the driver sends it: references to the columns that are in the backend's store, and the rest.

    Attributes:
        rows: of the batch.
        segments: references to lists of WireTensors.
        places: where each stored column is: (number of the segment, index in its list).
        rest: the state of the batch (see `Batch.__getstate__`) without the stored columns, or a reference to it.
    """

    rows: int
    segments: tuple[Any, ...]
    places: dict[str, tuple[int, int]]
    rest: Any

    def resolve(self, fetch: Fetch) -> DataProto:
        rest, *segments = fetch([self.rest, *self.segments])
        num_rows, further, arrays, meta_info = rest
        wires = {**further, **{name: segments[number][index] for name, (number, index) in self.places.items()}}
        return DataProto.from_state(num_rows, wires, arrays, meta_info)


@dataclass(frozen=True)
class ResolvedShard:
    """A shard's rows, and how many of them are real; the rest, at the end, repeat rows of the batch."""

    data: DataProto
    num_rows: int
    num_real_rows: int
    padded: bool  # some rank of this call holds padding rows
    ordered: bool  # the results go to the places where the rows are in the batch
    marked_before: bool  # the batch had a column is_pad of its own


@dataclass(frozen=True)
class BatchShard:
    """Shard `index` of `count` of the batch that `parts` make up in row order.

    Every shard has ceil(rows / count) rows. Where that is more than the batch has, the rows wrap around to the batch's
    first ones, and every shard carries the bool column `is_pad` that marks them. A batch without rows (only meta_info)
    is given to every rank whole.

    `positions` (ceil(rows / count),) int64 says which of the `total` rows of the parts these are; without it they are
    one after the other. `ordered` is for results: see ResolvedShard.
    """

    parts: tuple[Part, ...]
    index: int
    count: int
    columns: tuple[str, ...] | None = None  # None: all
    positions: np.ndarray | None = None
    total: int = 0
    ordered: bool = False

    def resolve(self, fetch: Fetch) -> ResolvedShard:
        """Fetch only the parts that hold this shard's rows; contiguous rows of one part stay a view, others are
        gathered with one copy."""
        part_rows = [header.rows for header in fetch([part.header for part in self.parts])]
        total = sum(part_rows)
        if total == 0:
            whole = DataProto.concat(self._payloads(fetch, range(len(self.parts))))
            return ResolvedShard(whole, 0, 0, padded=False, ordered=False, marked_before=False)
        if self.positions is not None and total != self.total:
            raise ValueError(f"an order of {self.total} rows was given for a future of {total} rows: order all of them")
        num_rows = -(-total // self.count)
        first = self.index * num_rows
        positions: np.ndarray | range = range(first, first + num_rows)
        if self.positions is not None or first + num_rows > total:
            positions = np.arange(first, first + num_rows) % total if self.positions is None else self.positions
        data = self._gather(fetch, part_rows, positions)
        for array in data.non_tensor_batch.values():
            array.flags.writeable = False  # a view of shared rows: NumPy itself refuses to write into it
        padded, num_real_rows = num_rows * self.count != total, min(num_rows, max(0, total - first))
        marked_before = PAD_COLUMN in data.tensors()
        if padded:
            data = _with_pad_column(data, torch.arange(num_rows) >= num_real_rows)
        return ResolvedShard(data, num_rows, num_real_rows, padded, self.ordered, marked_before)

    def _gather(self, fetch: Fetch, part_rows: list[int], positions: np.ndarray | range) -> DataProto:
        """The rows at `positions` of the parts, in that order."""
        ends = list(itertools.accumulate(part_rows))
        first, last = int(positions[0]), int(positions[-1])
        part = bisect.bisect_right(ends, first)
        if last < ends[part] and _is_range(positions):
            start = ends[part] - part_rows[part]
            return self._payloads(fetch, [part])[0].rows(first - start, last + 1 - start)
        owner = np.searchsorted(ends, positions, side="right")
        needed = sorted(set(owner.tolist()))
        taken, places = [], []
        for part, payload in zip(needed, self._payloads(fetch, needed), strict=True):
            (place,) = np.nonzero(owner == part)
            taken.append(_take(payload, np.asarray(positions)[place] - (ends[part] - part_rows[part])))
            places.append(place)
        if len(taken) == 1:
            return taken[0]
        place = np.concatenate(places)
        return DataProto.concat(taken, None if _is_range(place) else torch.from_numpy(place))

    def _payloads(self, fetch: Fetch, parts: Sequence[int]) -> list[DataProto]:
        """The batches of these parts, with the columns that are read."""
        payloads = fetch([self.parts[part].payload for part in parts])
        batches = [p.resolve(fetch) if isinstance(p, StoredBatch) else p for p in payloads]
        return batches if self.columns is None else [select_columns(batch, self.columns) for batch in batches]


@dataclass(frozen=True)
class ForwardedFuture:
    """A future given as an argument: references to its ranks' results, collected where they are used."""

    parts: tuple[Part, ...]
    collect: Callable[[list[Any]], Any]

    def resolve(self, fetch: Fetch) -> Any:
        return self.collect(fetch([part.payload for part in self.parts]))


def column_names(data: DataProto) -> set[str]:
    return {*data.tensors(), *data.non_tensor_batch}


def select_columns(data: DataProto, columns: Sequence[str]) -> DataProto:
    """Those of `columns` that exist, and the padding marks; meta_info is kept whole."""
    keep = {*columns, PAD_COLUMN}
    return data.select(
        batch_keys=[name for name in data.tensors() if name in keep],
        non_tensor_batch_keys=[name for name in data.non_tensor_batch if name in keep],
    )


def split_order(order: np.ndarray, count: int) -> list[np.ndarray]:
    """`count` equally long slices of a batch's row numbers, which wrap around to the first ones at the end."""
    return np.split(np.resize(order, -(-len(order) // count) * count), count)


def _take(data: DataProto, rows: np.ndarray) -> DataProto:
    """The rows at these numbers: a view if they are contiguous, else a copy."""
    return data.rows(int(rows[0]), int(rows[-1]) + 1) if _is_range(rows) else data.select_idxs(rows)


def _is_range(numbers: np.ndarray | range) -> bool:
    return isinstance(numbers, range) or bool((np.diff(numbers) == 1).all())


def _with_pad_column(data: DataProto, is_pad: torch.Tensor) -> DataProto:
    tensors = data.tensors()
    tensors[PAD_COLUMN] = is_pad | tensors[PAD_COLUMN] if PAD_COLUMN in tensors else is_pad
    return DataProto(TensorDict(tensors, batch_size=[len(is_pad)]), data.non_tensor_batch, data.meta_info)
