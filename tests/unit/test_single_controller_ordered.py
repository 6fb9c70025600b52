"""Rows and columns stay together and in order through every split, gather and collection, for any
sizes and orders."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.protocol import DataProto
from verl_like.single_controller import (
    Dispatch,
    Ordered,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs


class Observer(Worker):
    """Sends back what it got, and which rows these were."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_mesh(self, peers: int) -> None:
        self._register_dispatch_collect_info(
            "grid", self.rank // peers, is_collect=self.rank % peers == 0
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("grid"))
    def echo_on_mesh(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows_of_rank(self, batch: DataProto) -> list[int]:
        return batch.batch["number"].tolist()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def only_meta_info(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"done": True})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def two_per_row(self, batch: DataProto) -> DataProto:
        return batch.repeat(2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, batch: DataProto) -> list[int]:
        return batch.batch["number"].tolist()


GROUPS = {
    size: LocalWorkerGroup(ClassWithInitArgs(Observer), size, role=f"group{size}")
    for size in (1, 2, 3, 4, 6)
}
GROUPS[6].make_mesh(2)  # three shards, two peers each


def batch_of(rows: int, lengths: list[int]) -> DataProto:
    """Columns of every kind; row i holds i, in row i of the jagged column `lengths[i]` times."""
    number = torch.arange(rows)
    jagged = torch.nested.nested_tensor(
        [torch.full((n,), i) for i, n in enumerate(lengths)], layout=torch.jagged
    )
    return DataProto.from_dict(
        {"number": number, "matrix": number[:, None] * torch.tensor([1.0, 10.0]), "jagged": jagged},
        {"uid": [f"row {i}" for i in range(rows)], "square": number.numpy() ** 2},
        {"note": "kept"},
    )


@st.composite
def ordered_batches(draw: st.DrawFn) -> tuple[DataProto, np.ndarray]:
    rows = draw(st.integers(1, 13))
    lengths = draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
    return batch_of(rows, lengths), np.array(draw(st.permutations(range(rows))))


def test_the_sizes_of_an_ordered_batch_say_how_many_rows_each_rank_gets():
    batch = batch_of(5, [1] * 5)
    ordered = Ordered(batch, [4, 0, 3, 1, 2], sizes=[3, 0, 2])
    assert GROUPS[3].rows_of_rank(ordered) == [[4, 0, 3], [], [1, 2]]
    assert GROUPS[3].echo(ordered).equal(batch)
    handed_on = GROUPS[2].echo.remote(GROUPS[3].echo.remote(ordered))
    assert handed_on.get().equal(batch)
    with pytest.raises(ValueError, match="sizes for 3 ranks, but is split over 2"):
        GROUPS[2].echo(ordered)


def joined(by_rank: list[list[int]]) -> list[int]:
    return list(itertools.chain(*by_rank))


@settings(max_examples=40, deadline=None)
@given(given_batch=ordered_batches(), size=st.sampled_from([1, 2, 3, 4]))
def test_an_ordered_batch_comes_back_in_its_own_order_with_every_column(given_batch, size):
    batch, order = given_batch
    ordered = Ordered(batch, torch.from_numpy(order))
    assert GROUPS[size].echo(ordered).equal(batch)
    assert GROUPS[6].echo_on_mesh(ordered).equal(batch)
    assert joined(GROUPS[size].rows_of_rank(ordered)) == order.tolist(), (
        "rank i has the i-th slice of the order"
    )


@settings(max_examples=40, deadline=None)
@given(
    given_batch=ordered_batches(),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3),
)
def test_futures_of_ordered_calls_are_put_right_where_they_are_used(given_batch, sizes):
    batch, order = given_batch
    first, second, third = (GROUPS[size] for size in sizes)
    future = first.echo.remote(Ordered(batch, order))
    handed_on = second.echo.remote(future)
    assert handed_on.get().equal(batch), "a plain call takes the rows in the batch's order"
    assert joined(second.rows_of_rank(future)) == list(range(len(batch)))
    assert third.whole(future)[0] == list(range(len(batch)))
    again = third.echo.remote(Ordered(future, order))
    assert (
        again.get().equal(batch)
        and joined(third.rows_of_rank(Ordered(again, order[::-1]))) == order[::-1].tolist()
    )
    assert second.echo(Ordered(handed_on, order)).equal(batch)


def test_in_the_same_order_a_rank_gets_its_own_part_of_a_future_as_a_view():
    batch, order = batch_of(6, [1] * 6), np.array([4, 0, 2, 5, 1, 3])
    future = GROUPS[3].echo.remote(Ordered(batch, order))
    shards = GROUPS[3].split(Ordered(future, order), 3)
    for shard, part in zip(shards, future.parts, strict=True):
        assert (
            shard.resolve(list).batch["number"].data_ptr()
            == part.payload.batch["number"].data_ptr()
        )


def test_a_result_of_only_meta_info_needs_no_order_and_another_number_of_rows_is_an_error():
    ordered = Ordered(batch_of(5, [1] * 5), [4, 3, 2, 1, 0])
    assert GROUPS[2].only_meta_info(ordered).meta_info == {"done": True}
    assert GROUPS[3].only_meta_info(GROUPS[2].only_meta_info.remote(ordered)).meta_info == {
        "done": True
    }
    with pytest.raises(
        RuntimeError, match="returned 6 rows for 3 input rows: with an Ordered batch"
    ):
        GROUPS[2].two_per_row(ordered)


def test_an_ordered_batch_is_refused_where_it_has_no_meaning():
    batch = batch_of(4, [1] * 4)
    with pytest.raises(
        ValueError, match="whole got an Ordered batch, but ONE_TO_ALL does not split"
    ):
        GROUPS[2].whole(Ordered(batch, [0, 1, 2, 3]))
    with pytest.raises(ValueError, match="Ordered batch beside another one"):
        GROUPS[2].execute_with_func_generator(
            lambda worker, a, b: a, Ordered(batch, [3, 2, 1, 0]), batch
        )
    future = GROUPS[2].echo.remote(Ordered(batch, [3, 2, 1, 0]))
    with pytest.raises(ValueError, match="names each of its 4 rows once"):
        Ordered(future, [4, 3, 2, 1, 0])
    with pytest.raises(ValueError, match="names each of its 1 rows once"):
        Ordered(batch_of(1, [1]), np.array(0))
