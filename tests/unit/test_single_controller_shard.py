"""Which rows a shard holds and what it fetches, against the definition written with NumPy."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_like.protocol import CallHeader, DataProto, Part
from verl_like.single_controller import Ordered
from verl_like.single_controller.shard import BatchShard, split_order


def parts_of(sizes: list[int]) -> tuple[Part, ...]:
    """Parts whose row i has the value i; references are ("header" or "payload", part)."""
    return tuple(Part(("header", part), ("payload", part)) for part in range(len(sizes)))


class Store:
    """Resolves the references of `parts_of` and remembers which payloads were asked for."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.fetched = sizes, []

    def __call__(self, references):
        return [self.resolve(*reference) for reference in references]

    def resolve(self, kind: str, part: int):
        if kind == "header":
            return CallHeader(num_rows=self.sizes[part])
        self.fetched.append(part)
        first = sum(self.sizes[:part])
        values = torch.arange(first, first + self.sizes[part])
        return DataProto.from_dict(
            {"row": values, "other": values}, {"name": [str(int(v)) for v in values]}
        )


def slices(total: int, count: int) -> list[list[int]]:
    """Row numbers dealt out by hand: consecutive ones, the first shares one longer where they do
    not divide."""
    shares: list[list[int]] = []
    for index in range(count):
        start = sum(map(len, shares))
        shares.append(list(range(start, start + total // count + (index < total % count))))
    return shares


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), count=st.integers(1, 7))
def test_shards_divide_the_whole_batch_into_shares_that_differ_by_one_row_at_most(sizes, count):
    total = sum(sizes)
    if total == 0:
        return
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for index, rows in enumerate(slices(total, count)):
        store = Store(sizes)
        shard = BatchShard(parts_of(sizes), index, count).resolve(store)
        assert shard.batch["row"].tolist() == rows
        assert shard.non_tensor_batch["name"].tolist() == [str(row) for row in rows]
        if rows:
            assert store.fetched == sorted(set(owner[rows])), (
                "only the parts that hold its rows, once each"
            )


def test_a_shard_without_rows_has_the_columns_of_the_batch():
    sizes = [0, 2]
    shard = BatchShard(parts_of(sizes), 3, 4, columns=("row", "name")).resolve(Store(sizes))
    assert {name: (column.dtype, len(column)) for name, column in shard.columns().items()} == {
        "row": (torch.int64, 0),
        "name": (np.dtype(object), 0),
    }


def test_shards_of_a_batch_without_rows_have_its_columns():
    store = Store([0, 0])
    shard = BatchShard(parts_of([0, 0]), 1, 2).resolve(store)
    assert len(shard) == 0 and sorted(shard.columns()) == ["name", "other", "row"]


def test_equal_sizes_give_each_rank_exactly_its_own_part_as_a_view():
    data = DataProto.from_dict({"row": torch.arange(4)})
    shard = BatchShard(
        (Part(CallHeader(num_rows=2), None), Part(CallHeader(num_rows=4), data)), 1, 1
    )
    whole = BatchShard(shard.parts[1:], 0, 1).resolve(lambda references: references)
    assert whole.batch["row"].data_ptr() == data.batch["row"].data_ptr()
    second = BatchShard(shard.parts[1:], 1, 2).resolve(lambda references: references)
    assert second.batch["row"].data_ptr() == data.batch["row"][2:].data_ptr()


def test_only_the_listed_columns_are_kept_and_the_callers_marks():
    data = DataProto.from_dict(
        {"row": torch.arange(2), "other": torch.arange(2), "is_pad": torch.tensor([False, True])}
    )
    shard = BatchShard((Part(CallHeader(num_rows=2), data),), 0, 1, columns=("row",)).resolve(list)
    assert (sorted(shard.batch.keys()), shard.non_tensor_batch) == (["is_pad", "row"], {})


def test_arrays_of_a_shard_cannot_be_written():
    data = DataProto.from_dict({"row": torch.arange(2)}, {"length": np.arange(2)})
    shard = BatchShard((Part(CallHeader(num_rows=2), data),), 0, 1).resolve(
        lambda references: references
    )
    with pytest.raises(ValueError, match="read-only"):
        shard.non_tensor_batch["length"][0] = 5
    data.non_tensor_batch["length"][0] = 5  # the caller's own array stays writable


def test_a_shard_of_a_batch_with_only_meta_info_is_the_whole_batch():
    data = DataProto(meta_info={"temperature": 1.0})
    shard = BatchShard((Part(CallHeader(num_rows=0), data),), 1, 4).resolve(
        lambda references: references
    )
    assert shard.equal(data)


def test_a_description_of_a_shard_is_small_however_large_the_batch():
    assert len(pickle.dumps(BatchShard(parts_of([1000] * 8), 3, 8))) < 1000


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    count=st.integers(1, 7),
    data=st.data(),
)
def test_a_shard_of_given_positions_gathers_them_from_the_parts_that_hold_them(sizes, count, data):
    total = sum(sizes)
    if total == 0:
        return
    order = np.array(data.draw(st.permutations(range(total))))
    sizes_of_shards = data.draw(st.sampled_from([None, [total, *[0] * (count - 1)]]))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    places = (
        slices(total, count)
        if sizes_of_shards is None
        else [list(range(total)), *[[]] * (count - 1)]
    )
    for index, positions in enumerate(split_order(order, sizes_of_shards, count)):
        assert positions.tolist() == order[places[index]].tolist()
        store = Store(sizes)
        shard = BatchShard(
            parts_of(sizes), index, count, row_numbers=positions, num_batch_rows=total, ordered=True
        )
        resolved = shard.resolve(store)
        assert resolved.batch["row"].tolist() == positions.tolist()
        assert resolved.non_tensor_batch["name"].tolist() == [str(p) for p in positions]
        if len(positions):
            assert store.fetched == sorted(set(owner[positions])), (
                "only the parts that hold its rows, once each"
            )


def test_contiguous_positions_stay_a_view():
    data = DataProto.from_dict({"row": torch.arange(6)})
    part = Part(CallHeader(num_rows=6), data)
    shard = BatchShard((part,), 1, 2, row_numbers=np.array([2, 3, 4]), num_batch_rows=6)
    assert shard.resolve(list).batch["row"].data_ptr() == data.batch["row"][2:].data_ptr()


def test_an_order_for_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="an order of 4 rows was given for a future of 5 rows"):
        BatchShard(parts_of([5]), 0, 2, row_numbers=np.array([3, 2]), num_batch_rows=4).resolve(
            Store([5])
        )


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3], [[0, 1, 2]]])
def test_an_order_must_name_each_row_once(order):
    with pytest.raises(ValueError, match="names each of its 3 rows once"):
        Ordered(DataProto.from_dict({"row": torch.arange(3)}), order)


def test_sizes_of_an_order_must_fit_the_rows_and_the_ranks():
    data = DataProto.from_dict({"row": torch.arange(3)})
    for sizes in ([1, 1], [4, -1]):
        with pytest.raises(ValueError, match="add up to its 3 rows"):
            Ordered(data, [2, 0, 1], sizes)
    with pytest.raises(ValueError, match="sizes for 2 ranks, but is split over 3"):
        split_order(np.arange(3), [1, 2], 3)


def test_a_shard_without_rows_of_a_jagged_batch_joins_the_others():
    rows = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    data = DataProto.from_dict({"tokens": rows})
    parts = (Part(CallHeader(num_rows=2), data),)
    shards = [BatchShard(parts, index, 3).resolve(list) for index in range(3)]
    assert [len(shard) for shard in shards] == [1, 1, 0] and shards[2].batch["tokens"].is_nested
    assert DataProto.concat(shards).equal(data)
