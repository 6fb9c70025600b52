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
        return DataProto.from_dict({"row": values, "other": values}, {"name": [str(int(v)) for v in values]})


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), count=st.integers(1, 7))
def test_shards_wrap_around_the_whole_batch_and_mark_what_they_add(sizes, count):
    total = sum(sizes)
    if total == 0:
        return
    per_shard = int(np.ceil(total / count))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for index in range(count):
        store = Store(sizes)
        shard = BatchShard(parts_of(sizes), index, count).resolve(store)
        positions = np.arange(index * per_shard, (index + 1) * per_shard)
        assert shard.data.batch["row"].tolist() == (positions % total).tolist()
        assert shard.data.non_tensor_batch["name"].tolist() == [str(p % total) for p in positions]
        assert (shard.num_rows, shard.num_real_rows) == (per_shard, int((positions < total).sum()))
        assert shard.padded == (per_shard * count != total)
        if shard.padded:
            assert shard.data.batch["is_pad"].tolist() == (positions >= total).tolist()
        else:
            assert "is_pad" not in shard.data.batch
        assert store.fetched == sorted(set(owner[positions % total])), "only the parts that hold its rows, once each"


def test_equal_sizes_give_each_rank_exactly_its_own_part_as_a_view():
    data = DataProto.from_dict({"row": torch.arange(4)})
    shard = BatchShard((Part(CallHeader(num_rows=2), None), Part(CallHeader(num_rows=4), data)), 1, 1)
    whole = BatchShard(shard.parts[1:], 0, 1).resolve(lambda references: references)
    assert whole.data.batch["row"].data_ptr() == data.batch["row"].data_ptr()
    second = BatchShard(shard.parts[1:], 1, 2).resolve(lambda references: references)
    assert second.data.batch["row"].data_ptr() == data.batch["row"][2:].data_ptr()


def test_only_the_listed_columns_are_kept_and_the_marks():
    shard = BatchShard(parts_of([3]), 1, 2, columns=("row",)).resolve(Store([3]))
    assert (sorted(shard.data.batch.keys()), shard.data.non_tensor_batch) == (["is_pad", "row"], {})


def test_arrays_of_a_shard_cannot_be_written():
    data = DataProto.from_dict({"row": torch.arange(2)}, {"length": np.arange(2)})
    shard = BatchShard((Part(CallHeader(num_rows=2), data),), 0, 1).resolve(lambda references: references)
    with pytest.raises(ValueError, match="read-only"):
        shard.data.non_tensor_batch["length"][0] = 5
    data.non_tensor_batch["length"][0] = 5  # the caller's own array stays writable


def test_a_shard_of_a_batch_with_only_meta_info_is_the_whole_batch():
    data = DataProto(meta_info={"temperature": 1.0})
    shard = BatchShard((Part(CallHeader(num_rows=0), data),), 1, 4).resolve(lambda references: references)
    assert shard.data.equal(data) and not shard.padded


def test_a_description_of_a_shard_is_small_however_large_the_batch():
    assert len(pickle.dumps(BatchShard(parts_of([1000] * 8), 3, 8))) < 1000


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), count=st.integers(1, 7), data=st.data())
def test_a_shard_of_given_positions_gathers_them_from_the_parts_that_hold_them(sizes, count, data):
    total = sum(sizes)
    if total == 0:
        return
    order = np.array(data.draw(st.permutations(range(total))))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    per_shard = int(np.ceil(total / count))
    for index, positions in enumerate(split_order(order, count)):
        numbers = np.arange(index * per_shard, (index + 1) * per_shard)
        assert positions.tolist() == order[numbers % total].tolist()
        store = Store(sizes)
        shard = BatchShard(parts_of(sizes), index, count, row_numbers=positions, num_batch_rows=total, ordered=True)
        resolved = shard.resolve(store)
        assert resolved.data.batch["row"].tolist() == positions.tolist()
        assert resolved.data.non_tensor_batch["name"].tolist() == [str(p) for p in positions]
        assert resolved.num_real_rows == int((numbers < total).sum()) and resolved.ordered
        assert store.fetched == sorted(set(owner[positions])), "only the parts that hold its rows, once each"


def test_contiguous_positions_stay_a_view():
    data = DataProto.from_dict({"row": torch.arange(6)})
    part = Part(CallHeader(num_rows=6), data)
    shard = BatchShard((part,), 1, 2, row_numbers=np.array([2, 3, 4]), num_batch_rows=6)
    assert shard.resolve(list).data.batch["row"].data_ptr() == data.batch["row"][2:].data_ptr()


def test_an_order_for_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="an order of 4 rows was given for a future of 5 rows"):
        BatchShard(parts_of([5]), 0, 2, row_numbers=np.array([3, 2]), num_batch_rows=4).resolve(Store([5]))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3], [[0, 1, 2]]])
def test_an_order_must_name_each_row_once(order):
    with pytest.raises(ValueError, match="names each of its 3 rows once"):
        Ordered(DataProto.from_dict({"row": torch.arange(3)}), order)
