"""The share of a batch that one rank works on, described by references and resolved on the worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_like.protocol import PAD_COLUMN, DataProto, DataProtoFuture, Part

# Turns references into values, in order; anything that is not a reference of the backend passes through.
Fetch = Callable[[list[Any]], list[Any]]


class Ordered:
    """A batch of which rank i of a group gets the i-th equal slice of `order`, instead of the i-th slice of its rows.

    The result comes back in the batch's own order. The batch itself, or the future of one, is not copied: each rank
    gathers its rows. `order` (B,) are the row numbers of the batch, each of them once, or ValueError is raised.
    """

    def __init__(self, batch: DataProto | DataProtoFuture, order: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        self.batch = batch
        self.order = np.asarray(order, dtype=np.int64)
        # A future has its number of rows only where its ranks worked in another order.
        known = batch if isinstance(batch, DataProto) else self.order if batch.order is None else batch.order
        num_rows = len(known)
        if self.order.shape != (num_rows,) or not np.array_equal(np.sort(self.order), np.arange(num_rows)):
            raise ValueError(
                f"the order of an Ordered batch names each of its {num_rows} rows once, got {self.order.shape} "
                f"numbers: {self.order[:20].tolist()}"
            )


# What a dispatch mode can split over the ranks.
Splittable = DataProto | DataProtoFuture | Ordered


@dataclass(frozen=True)
class ResolvedShard:
    """The rows of a shard. Those after the first `num_real_rows` are padding rows, which repeat rows of the batch."""

    data: DataProto
    num_rows: int
    num_real_rows: int
    padded: bool  # some rank of this call holds padding rows
    ordered: bool  # the batch was an Ordered one
    marked_before: bool  # the caller's batch had a column is_pad


@dataclass(frozen=True)
class BatchShard:
    """Shard `index` of `num_shards` of the batch that `parts` make up in row order.

    Every shard has ceil(B / num_shards) rows. Where that is more than the batch has, the rows wrap around to the
    batch's first ones, and every shard carries the bool column `is_pad` that marks them. A batch without rows (only
    meta_info) is given to every rank whole.

    `row_numbers` (ceil(B / num_shards),) int64 are the rows of this shard, for a batch of `num_batch_rows` rows; None:
    the index-th slice. `ordered`: see ResolvedShard. `columns`: the only ones to keep, None for all.
    """

    parts: tuple[Part, ...]
    index: int
    num_shards: int
    columns: Sequence[str] | None = None
    row_numbers: np.ndarray | None = None
    num_batch_rows: int = 0
    ordered: bool = False

    def resolve(self, fetch: Fetch) -> ResolvedShard:
        """Fetch only the parts that hold this shard's rows, see `gather_rows`."""

        def payloads(numbers: Sequence[int]) -> list[DataProto]:
            batches = fetch([self.parts[number].payload for number in numbers])
            return batches if self.columns is None else [select_columns(batch, self.columns) for batch in batches]

        sizes = [header.num_rows for header in fetch([part.header for part in self.parts])]
        total = sum(sizes)
        if total == 0:
            whole = DataProto.concat(payloads(range(len(sizes))))
            return ResolvedShard(whole, 0, 0, padded=False, ordered=False, marked_before=False)
        row_numbers, num_rows = self.row_numbers, -(-total // self.num_shards)
        first = self.index * num_rows
        if row_numbers is None:
            row_numbers = np.arange(first, first + num_rows) % total
        elif total != self.num_batch_rows:
            raise ValueError(
                f"an order of {self.num_batch_rows} rows was given for a future of {total} rows: order all of them"
            )
        data = gather_rows(sizes, row_numbers, payloads)
        for array in data.non_tensor_batch.values():
            array.flags.writeable = False  # a view of shared rows: NumPy itself refuses to write into it
        padded, num_real_rows = num_rows * self.num_shards != total, min(num_rows, max(0, total - first))
        tensors = data.tensors()
        marked_before = PAD_COLUMN in tensors
        if padded:
            is_pad = torch.arange(num_rows) >= num_real_rows
            tensors[PAD_COLUMN] = is_pad | tensors[PAD_COLUMN] if marked_before else is_pad
            data = DataProto(TensorDict(tensors, batch_size=[num_rows]), data.non_tensor_batch, data.meta_info)
        return ResolvedShard(data, num_rows, num_real_rows, padded, self.ordered, marked_before)


@dataclass(frozen=True)
class ForwardedFuture:
    """A future given as an argument: references to its ranks' results, collected where they are used."""

    parts: tuple[Part, ...]
    collect: Callable[[list[Any]], Any]

    def resolve(self, fetch: Fetch) -> Any:
        return self.collect(fetch([part.payload for part in self.parts]))


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


def gather_rows(
    sizes: Sequence[int], row_numbers: np.ndarray, fetch: Callable[[Sequence[int]], list[DataProto]]
) -> DataProto:
    """The rows `row_numbers`, in this order, of the batch that parts of `sizes` rows make up.

    `fetch` is called once, with the numbers of the parts that hold these rows, and returns the parts. Contiguous rows
    of one part are a view, others are copies.
    """
    ends = np.cumsum(sizes)
    starts = ends - sizes
    order = [((row_numbers >= a) & (row_numbers < b)).nonzero()[0] for a, b in zip(starts, ends, strict=True)]
    needed, taken = [part for part, places in enumerate(order) if len(places)], []
    for part, payload in zip(needed, fetch(needed), strict=True):
        rows = row_numbers[order[part]] - starts[part]
        taken.append(payload.rows(int(rows[0]), int(rows[-1]) + 1) if _is_range(rows) else payload.select_idxs(rows))
    if len(taken) == 1:
        return taken[0]
    joined, whole_order = DataProto.concat(taken), np.concatenate(order)
    return joined if _is_range(whole_order) else joined.select_idxs(whole_order.argsort())


def _is_range(numbers: np.ndarray) -> bool:
    return bool((numbers[1:] - numbers[:-1] == 1).all())
