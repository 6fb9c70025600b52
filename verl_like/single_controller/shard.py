"""The share of a batch that one rank works on, described by references and resolved on the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from verl_like.protocol import PAD_COLUMN, DataProto, Part

# Turns references into values, in order; anything that is not a reference of the backend passes through.
Fetch = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class ResolvedShard:
    """A shard's rows, and how many of them are real; the rest, at the end, repeat rows of the batch."""

    data: DataProto
    num_rows: int
    num_real_rows: int
    padded: bool  # some rank of this call holds padding rows
    marked_before: bool  # the batch had a column is_pad of its own


@dataclass(frozen=True)
class BatchShard:
    """Shard `index` of `count` of the batch that `parts` make up in row order.

    Every shard has ceil(rows / count) rows. Where that is more than the batch has, the rows wrap around to the batch's
    first ones, and every shard carries the bool column `is_pad` that marks them. A batch without rows (only meta_info)
    is given to every rank whole.
    """

    parts: tuple[Part, ...]
    index: int
    count: int
    columns: tuple[str, ...] | None = None  # None: all

    def resolve(self, fetch: Fetch) -> ResolvedShard:
        """Fetch only the parts that hold this shard's rows; contiguous rows of one part stay a view."""
        part_rows = [header.rows for header in fetch([part.header for part in self.parts])]
        total = sum(part_rows)
        if total == 0:
            whole = DataProto.concat(fetch([part.payload for part in self.parts]))
            return ResolvedShard(whole, 0, 0, padded=False, marked_before=False)
        num_rows = -(-total // self.count)
        first = self.index * num_rows
        pieces = _locate_rows(part_rows, first, num_rows)
        needed = sorted({part for part, _, _ in pieces})
        payloads = dict(zip(needed, fetch([self.parts[part].payload for part in needed]), strict=True))
        views = [self._select(payloads[part]).rows(start, stop) for part, start, stop in pieces]
        data = views[0] if len(views) == 1 else DataProto.concat(views)
        for array in data.non_tensor_batch.values():
            array.flags.writeable = False  # a view of shared rows: NumPy itself refuses to write into it
        marked_before = PAD_COLUMN in data.tensors()
        if num_rows * self.count == total:
            return ResolvedShard(data, num_rows, num_rows, padded=False, marked_before=marked_before)
        num_real_rows = min(num_rows, max(0, total - first))
        is_pad = torch.arange(num_rows) >= num_real_rows
        data = _with_pad_column(data, is_pad)
        return ResolvedShard(data, num_rows, num_real_rows, padded=True, marked_before=marked_before)

    def _select(self, data: DataProto) -> DataProto:
        return data if self.columns is None else select_columns(data, self.columns)


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


def _locate_rows(part_rows: list[int], first: int, count: int) -> list[tuple[int, int, int]]:
    """(part, start, stop) pieces that hold `count` rows from row `first` on, wrapping around at the end."""
    total = sum(part_rows)
    pieces = []
    position, remaining = first % total, count
    while remaining:
        offset = 0
        for part, rows in enumerate(part_rows):
            start, stop = max(position - offset, 0), min(rows, position + remaining - offset)
            if start < stop:
                pieces.append((part, start, stop))
            offset += rows
        remaining -= min(remaining, total - position)
        position = 0
    return pieces


def _with_pad_column(data: DataProto, is_pad: torch.Tensor) -> DataProto:
    tensors = data.tensors()
    tensors[PAD_COLUMN] = is_pad | tensors[PAD_COLUMN] if PAD_COLUMN in tensors else is_pad
    return DataProto(TensorDict(tensors, batch_size=[len(is_pad)]), data.non_tensor_batch, data.meta_info)
