"""The share of a batch that one rank works on. References describe it, and the worker resolves
them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from verl_like.protocol import PAD_COLUMN, DataProto, DataProtoFuture, Part

# Turns references into values, in order; anything that is not a reference of the backend passes
# through.
Fetch = Callable[[list[Any]], list[Any]]


class Ordered:
    """A batch of which rank i of a group gets the i-th slice of `order`, instead of the i-th slice
    of its rows.

    The result comes back in the batch's own order. The batch itself, or the future of one, is not
    copied: each rank gathers its rows.

    Args:
        batch: of B rows.
        order: (B,) the row numbers of the batch, each of them once, or ValueError is raised.
        sizes: how many rows each rank gets; None for as equal a number as possible.
    """

    def __init__(
        self,
        batch: DataProto | DataProtoFuture,
        order: Sequence[int] | np.ndarray | Tensor,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.batch = batch
        self.sizes = sizes
        self.order = np.asarray(order, dtype=np.int64)
        num_rows = self.order.size
        if isinstance(batch, DataProto):
            num_rows = len(batch)
        elif batch.order is not None:  # of another future nobody knows the number of rows yet
            num_rows = len(batch.order)
        ascending = np.sort(self.order, axis=None)
        has_each_row_once = np.array_equal(ascending, np.arange(num_rows))
        if self.order.ndim != 1 or not has_each_row_once:
            raise ValueError(
                f"the order of an Ordered batch names each of its {num_rows} rows once, got "
                f"{self.order.shape} numbers: {self.order.flatten()[:20].tolist()}"
            )
        if sizes is not None:
            smallest = min(sizes, default=0)
            if smallest < 0 or sum(sizes) != num_rows:
                raise ValueError(
                    f"the sizes of an Ordered batch add up to its {num_rows} rows, got "
                    f"{list(sizes)}"
                )


# What a dispatch mode can split over the ranks.
Splittable = DataProto | DataProtoFuture | Ordered


@dataclass(frozen=True)
class BatchShard:
    """Shard `index` of `num_shards` of the batch that `parts` make up in row order.

    Shards are consecutive rows; the first ones have one row more where the rows do not divide, and
    the last ones none where there are fewer rows than shards. A shard without rows has the batch's
    columns.

    `row_numbers` int64 are the rows of this shard, for a batch of `num_batch_rows` rows; None means
    the index-th slice. `ordered` says that the batch was an Ordered one. `columns` are the only
    ones to keep; None means all.
    """

    parts: tuple[Part, ...]
    index: int
    num_shards: int
    columns: Sequence[str] | None = None
    row_numbers: np.ndarray | None = None
    num_batch_rows: int = 0
    ordered: bool = False

    def resolve(self, fetch: Fetch) -> DataProto:
        """Returns the rows of this shard. Only the parts that hold them are fetched, see
        `gather_rows`."""

        def payloads(numbers: Sequence[int]) -> list[DataProto]:
            references = [self.parts[number].payload for number in numbers]
            batches = fetch(references)
            if self.columns is None:
                return batches
            return [select_columns(batch, self.columns) for batch in batches]

        header_references = [part.header for part in self.parts]
        headers = fetch(header_references)
        sizes = [header.num_rows for header in headers]
        total = sum(sizes)
        if total == 0:
            all_numbers = range(len(sizes))
            return DataProto.concat(payloads(all_numbers))
        row_numbers = self.row_numbers
        if row_numbers is None:
            all_rows = np.arange(total)
            shares = np.array_split(all_rows, self.num_shards)
            row_numbers = shares[self.index]
        elif total != self.num_batch_rows:
            raise ValueError(
                f"an order of {self.num_batch_rows} rows was given for a future of {total} rows: "
                "order all of them"
            )
        data = gather_rows(sizes, row_numbers, payloads)
        for array in data.non_tensor_batch.values():
            # A view of shared rows: NumPy itself refuses to write into it
            array.flags.writeable = False
        return data


@dataclass(frozen=True)
class ForwardedFuture:
    """A future that is given as an argument: references to its ranks' results, which are collected
    where they are used."""

    parts: tuple[Part, ...]
    collect: Callable[[list[Any]], Any]

    def resolve(self, fetch: Fetch) -> Any:
        references = [part.payload for part in self.parts]
        outputs = fetch(references)
        return self.collect(outputs)


def select_columns(data: DataProto, columns: Sequence[str]) -> DataProto:
    """Returns a batch with those of `columns` that exist, the padding marks, and the whole
    meta_info."""
    keep = {*columns, PAD_COLUMN}
    return data.select(
        batch_keys=[name for name in data.tensors() if name in keep],
        non_tensor_batch_keys=[name for name in data.non_tensor_batch if name in keep],
    )


def split_order(order: np.ndarray, sizes: Sequence[int] | None, count: int) -> list[np.ndarray]:
    """Returns `count` slices of a batch's row numbers, of these sizes or as equal as possible."""
    if sizes is None:
        return np.array_split(order, count)
    if len(sizes) != count:
        raise ValueError(
            f"an Ordered batch has sizes for {len(sizes)} ranks, but is split over {count}"
        )
    ends = np.cumsum(sizes)
    return np.split(order, ends[:-1])


def gather_rows(
    sizes: Sequence[int],
    row_numbers: np.ndarray,
    fetch_parts: Callable[[Sequence[int]], list[DataProto]],
) -> DataProto:
    """Returns the rows `row_numbers`, in this order, of the batch that parts of `sizes` rows make
    up.

    `fetch_parts` is called once, with the numbers of the parts that hold these rows, and returns
    them. Contiguous rows of one part are a view, others are copies. If no rows are wanted, the
    columns come from a part that has rows, because that has all columns.
    """
    if not len(row_numbers):
        filled = [part for part, size in enumerate(sizes) if size]
        smallest = min(filled, key=sizes.__getitem__)
        (payload,) = fetch_parts([smallest])
        return payload.rows(0, 0)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    part_of_row = np.searchsorted(ends, row_numbers, side="right")
    needed = np.unique(part_of_row).tolist()
    payloads = fetch_parts(needed)
    taken = []
    for part, payload in zip(needed, payloads, strict=True):
        numbers = row_numbers[part_of_row == part]
        rows = numbers - starts[part]
        if _is_range(rows):
            first = int(rows[0])
            share = payload.rows(first, first + len(rows))
        else:
            share = payload.select_idxs(rows)
        taken.append(share)
    if len(taken) == 1:
        return taken[0]
    joined = DataProto.concat(taken)
    places = part_of_row.argsort(kind="stable")  # where its rows are among `row_numbers`
    if _is_range(places):
        return joined
    in_order = places.argsort()
    return joined.select_idxs(in_order)


def _is_range(numbers: np.ndarray) -> bool:
    steps = np.diff(numbers)
    return bool((steps == 1).all())
