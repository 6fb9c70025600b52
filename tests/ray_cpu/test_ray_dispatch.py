"""Every dispatch mode with every execute mode that goes with it, blocking and as a future, on both
backends."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from toy_workers import Grandchild, ToyWorker

from verl_like.protocol import DataProto, DataProtoFuture
from verl_like.single_controller import CallEvent, Ordered, PerRank, WorkerError, WorkerGroup
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

EVENTS: list[CallEvent] = []


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """A group of four ranks that scales by 10 and one of two ranks that scales by 100."""
    fours, twos = (
        RayClassWithInitArgs(Grandchild, 10.0),
        RayClassWithInitArgs(ToyWorker, scale=100.0),
    )
    EVENTS.clear()
    if request.param == "local":
        yield (
            LocalWorkerGroup(fours, 4, role="four", on_call=EVENTS.append),
            LocalWorkerGroup(twos, 2, role="two"),
        )
        return
    request.getfixturevalue("ray_cluster")
    pools = [RayResourcePool([size], use_gpu=False) for size in (4, 2)]
    four = RayWorkerGroup(pools[0], fours, role="four", on_call=EVENTS.append)
    two = RayWorkerGroup(pools[1], twos, role="two")
    yield four, two
    four.shutdown()
    two.shutdown()


@pytest.fixture
def four(groups: tuple[WorkerGroup, WorkerGroup]) -> Any:
    return groups[0]


@pytest.fixture
def two(groups: tuple[WorkerGroup, WorkerGroup]) -> Any:
    return groups[1]


@pytest.fixture(params=["blocking", "remote"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls a group's method and returns its value, in either way."""
    if request.param == "blocking":
        return lambda method, *args, **kwargs: method(*args, **kwargs)
    return lambda method, *args, **kwargs: method.remote(*args, **kwargs).get(timeout=60)


def batch_of(rows: int, **meta_info: Any) -> DataProto:
    values = torch.arange(rows, dtype=torch.float32)
    return DataProto.from_dict(
        {"values": values, "unused": values.clone()},
        {"uid": [f"0-{i}" for i in range(rows)]},
        meta_info,
    )


def test_rank_zero_runs_on_rank_zero_only_and_gives_its_own_value(four, call):
    assert call(four.rank_zero, "x") == ("overridden", "x")


def test_an_override_without_the_decorator_keeps_the_inherited_registration(four, two):
    assert (four.rank_zero(1), two.rank_zero(1)) == (("overridden", 1), (0, 1))


def test_one_to_all_gives_every_rank_the_same_value(four, call):
    assert call(four.one_to_all, x=[7, 8, 9, 10]) == [(rank, [7, 8, 9, 10]) for rank in range(4)]


def test_one_to_all_on_rank_zero_gets_the_plain_value(four, call):
    assert call(four.one_to_all_on_rank_zero, "x") == (0, "x")


def test_all_to_all_never_shards_a_list_by_its_length(four, call):
    assert call(four.all_to_all, [1, 2, 3, 4]) == [(rank, [1, 2, 3, 4], None) for rank in range(4)]


def test_all_to_all_gives_per_rank_values_element_wise(four, call):
    expected = [(rank, "abcd"[rank], "same") for rank in range(4)]
    assert call(four.all_to_all, PerRank(["a", "b", "c", "d"]), y="same") == expected


def test_per_rank_values_that_are_too_few_are_refused(four):
    with pytest.raises(ValueError, match="got 3 values for the 4 ranks of four"):
        four.all_to_all(PerRank([1, 2, 3]))


def test_all_to_all_on_rank_zero_gets_the_plain_value(four, call):
    assert call(four.all_to_all_on_rank_zero, [1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"PerRank needs Execute\.ALL"):
        four.all_to_all_on_rank_zero(PerRank([1, 2, 3, 4]))


@pytest.mark.parametrize("sequence", [list, tuple])
def test_dp_compute_gives_lists_and_tuples_element_wise(four, call, sequence):
    assert call(four.dp_compute, sequence([1, 2, 3, 4]), factor=sequence([1, 10, 100, 1000])) == [
        1,
        20,
        300,
        4000,
    ]


@pytest.mark.parametrize(
    ("wrong", "what"), [([1, 2, 3], "got 3 values for the 4 ranks"), (5, "got int")]
)
def test_dp_compute_refuses_what_it_cannot_give_element_wise(four, wrong, what):
    with pytest.raises(ValueError, match=what):
        four.dp_compute(wrong, [1, 1, 1, 1])


def test_a_batch_is_split_in_row_order_and_the_results_are_concatenated(four, call):
    result = call(four.scale_values, batch_of(8), shift=1.0)
    assert result.batch["scaled"].tolist() == [1.0, 11.0, 21.0, 31.0, 41.0, 51.0, 61.0, 71.0]
    assert result.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_only_the_columns_a_method_reads_travel(four):
    assert four.scale_values(batch_of(8)).meta_info["columns"] == ["values"]


@pytest.mark.parametrize(
    ("rows", "rank_of_row"),
    [(7, [0, 0, 1, 1, 2, 2, 3]), (1, [0]), (5, [0, 0, 1, 2, 3]), (0, []), (3, [0, 1, 2])],
)
def test_any_number_of_rows_is_divided_as_evenly_as_it_goes(four, call, rows, rank_of_row):
    data = batch_of(rows, note="kept")
    result = call(four.scale_values, data)
    assert result.batch["scaled"].tolist() == [10.0 * row for row in range(rows)]
    assert result.batch["rank"].tolist() == rank_of_row
    assert result.non_tensor_batch["uid"].tolist() == [f"0-{row}" for row in range(rows)]
    assert result.meta_info["columns"] == ["values"], "also on ranks without rows"
    assert data.equal(batch_of(rows, note="kept")), "the caller's batch is not touched"
    assert call(four.echo, data).equal(data)


def test_a_row_may_have_several_outputs(four, call):
    assert call(four.two_outputs_per_row, batch_of(3)).batch["values"].tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert call(four.one_output_per_rank, batch_of(7)).batch["values"].tolist() == [0, 2, 4, 6]


def test_a_callers_own_padding_mark_travels_to_the_workers_and_back(four):
    data = batch_of(3)
    data.batch["is_pad"] = torch.tensor([False, True, False])
    assert four.echo(data).equal(data)
    assert [r["real"] for r in four.count_real_rows(data)] == [1, 0, 1, 0]


def test_metrics_in_meta_info_are_merged_over_ranks_that_have_unequal_numbers_of_rows(four, call):
    # 0 + 1 + ... + 6
    assert call(four.add_up, batch_of(7)).meta_info["metrics"]["sum"].value == 21.0


def test_dp_compute_metric_returns_every_ranks_result(four, call):
    assert call(four.count_real_rows, batch_of(1)) == [
        {"rank": rank, "rows": int(rank == 0), "real": int(rank == 0)} for rank in range(4)
    ]


def test_a_batch_of_meta_info_alone_reaches_every_rank(four):
    assert four.echo(DataProto(meta_info={"temperature": 0.5})).meta_info == {"temperature": 0.5}


def test_jagged_and_numeric_columns_survive_an_uneven_split(four):
    rows = [torch.arange(length) for length in (3, 1, 4, 1, 5)]
    data = DataProto.from_dict(
        {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)},
        {"length": np.array([3, 1, 4, 1, 5])},
    )
    assert four.echo(data).equal(data)


def test_a_large_batch_arrives_unchanged(four):
    data = DataProto.from_dict(
        {"values": torch.randn(7, 100_000), "half": torch.randn(7, 1000).bfloat16()}
    )
    assert four.echo(data).equal(data)


def double_by_rank(worker, batch, factor):
    return DataProto.from_dict({"values": batch.batch["values"] * factor + worker.rank})


def test_a_function_runs_on_every_rank_with_its_share_of_the_batch(four, call):
    result = call(four.execute_with_func_generator, double_by_rank, batch_of(8), factor=2)
    assert result.batch["values"].tolist() == [0, 2, 5, 7, 10, 12, 15, 17]
    assert call(four.execute_with_func_generator, lambda worker, b: b, batch_of(5)).equal(
        batch_of(5)
    )


def test_a_function_mode_needs_a_function(four):
    with pytest.raises(ValueError, match="takes a callable first"):
        four.execute_with_func_generator(batch_of(8), batch_of(8))


def test_a_function_runs_on_rank_zero(four, call):
    assert call(four.execute_func_rank_zero, lambda a, b: a + b, 1, b=2) == 3


def test_a_registered_method_is_called_by_its_name_on_every_rank_or_on_rank_zero(four):
    assert four.execute_all_sync("one_to_all", PerRank([5, 6, 7, 8])) == [
        (0, 5),
        (1, 6),
        (2, 7),
        (3, 8),
    ]
    assert four.execute_all_async("rank_zero", x=1).get(timeout=60) == [("overridden", 1)] * 4
    assert four.execute_rank_zero_sync("one_to_all", [1, 2]) == (0, [1, 2])
    assert four.execute_rank_zero("all_to_all", 1, y=2).get(timeout=60) == (0, 1, 2)
    with pytest.raises(ValueError, match="four has no registered method 'shutdown'"):
        four.execute_all_sync("shutdown")


def test_a_registered_mode_of_the_user_is_used(four, call):
    expected = [(0, "a"), (1, "b"), (2, "c"), (3, "d"), (0, "e")]
    assert call(four.cards, ["a", "b", "c", "d", "e"]) == expected


def test_mesh_dispatch_gives_tensor_parallel_peers_one_shard(groups, call):
    four, two = groups
    with pytest.raises(WorkerError, match=r"mesh 'grid' is not registered on rank 0"):
        two.grid_compute(batch_of(4))
    if "grid" not in four._meshes:
        four.make_grid(tensor_parallel=2)
    result = call(four.grid_compute, batch_of(3))
    assert result.batch["scaled"].tolist() == [0.0, 10.0, 20.0]
    # Ranks 1 and 3 computed the same rows and are not collected
    assert result.batch["rank"].tolist() == [0, 0, 2]


def test_async_methods_are_awaited(four, call):
    assert call(four.wait_and_say, "x") == [(rank, "x") for rank in range(4)]


def test_blocking_is_the_methods_default_and_remote_always_gives_a_future(four):
    future = four.not_blocking(1)
    assert future.get() == four.not_blocking.remote(1).get() == [(rank, 1) for rank in range(4)]
    assert four.not_blocking(1).get(timeout=30) and future.done()


@pytest.mark.parametrize("rows", [8, 7, 1])
def test_a_future_is_handed_on_between_groups_of_any_size(groups, rows):
    four, two = groups
    expected = [value * 10 for value in range(rows)]
    there = four.scale_values.remote(batch_of(rows))
    assert isinstance(there, DataProtoFuture)
    assert four.echo(there).batch["scaled"].tolist() == expected, "same size"
    back = two.echo.remote(there)
    assert back.get().batch["scaled"].tolist() == expected, "fewer ranks"
    assert four.echo(back).batch["scaled"].tolist() == expected, "more ranks"
    assert two.describe(back) == [f"DataProto of {rows}"] * 2, (
        "whole, where the mode does not split"
    )


@pytest.mark.parametrize("rows", [8, 7])
def test_an_ordered_batch_is_dealt_in_its_order_and_comes_back_in_the_batchs(groups, call, rows):
    four, two = groups
    order = [6, 0, 5, 1, 4, 2, 3, 7][:rows]
    data = batch_of(rows)
    result = call(four.scale_values, Ordered(data, order))
    assert result.batch["scaled"].tolist() == [10.0 * row for row in range(rows)]
    assert result.non_tensor_batch["uid"].tolist() == [f"0-{row}" for row in range(rows)]
    assert result.batch["rank"][order].tolist() == [0, 0, 1, 1, 2, 2, 3, 3][:rows]
    future = four.scale_values.remote(Ordered(data, order))
    assert two.echo(future).batch["scaled"].tolist() == [10.0 * row for row in range(rows)]


def test_parts_of_a_handed_on_future_go_to_the_rank_of_the_same_number(four):
    future = four.scale_values.remote(batch_of(8))
    made, received = four.echo(future), four.scale_values.remote(batch_of(8)).get()
    assert (
        made.batch["rank"].tolist() == received.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    )


def test_futures_of_mesh_calls_are_handed_on_without_the_peers(groups):
    four, two = groups
    if "grid" not in four._meshes:
        four.make_grid(tensor_parallel=2)
    assert two.echo(four.grid_compute.remote(batch_of(5))).batch["rank"].tolist() == [0, 0, 0, 2, 2]


def test_other_futures_arrive_as_their_value(groups):
    four, two = groups
    assert two.one_to_all(four.not_blocking(5)) == [
        (rank, [(r, 5) for r in range(4)]) for rank in range(2)
    ]
    assert two.one_to_all(x=four.rank_zero.remote(5)) == [
        (rank, ("overridden", 5)) for rank in range(2)
    ]
    assert two.one_to_all(four.cards.remote(["a", "b"]))[1] == (1, [(0, "a"), (1, "b")])


def test_a_missing_column_is_found_before_the_call_and_its_writer_named(four):
    with pytest.raises(
        ValueError,
        match=r"four\.read_advantages reads 'advantages'.*written by: driver, by the adv",
    ) as caught:
        four.read_advantages(batch_of(8))
    assert "Present: ['uid', 'unused', 'values']" in str(caught.value) and not isinstance(
        caught.value, WorkerError
    )


def test_a_missing_column_of_a_future_is_found_on_the_worker(four):
    with pytest.raises(WorkerError, match=r"four\.read_advantages reads 'advantages'"):
        four.read_advantages(four.echo.remote(batch_of(8)))


def test_a_column_that_was_promised_and_not_written_is_an_error(four):
    with pytest.raises(WorkerError, match=r"four\.forget_to_write declares to write \['scaled'\]"):
        four.forget_to_write(batch_of(8))


def test_writing_in_place_into_the_input_is_an_error_and_replacing_a_column_is_not(four):
    assert four.replace_column(batch_of(8)).batch["values"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(
        WorkerError, match=r"write_in_place wrote in place into the input column 'values'"
    ):
        four.write_in_place(batch_of(8))


def test_a_result_that_cannot_be_concatenated_is_an_error(four, call):
    with pytest.raises(ValueError, match="rank 0 of four returned float"):
        call(four.return_a_number, batch_of(8))


def test_arguments_are_checked_against_the_signature_before_the_call(four):
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        four.all_to_all(1, z=2)


def test_an_error_names_role_rank_and_method_and_shows_the_workers_traceback(four, call):
    with pytest.raises(
        WorkerError, match=r"four rank 2 .* failed in fail_on: KeyError: 'no such thing'"
    ) as caught:
        call(four.fail_on, 2)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("four", 2, "fail_on") and error.pid > 0
    assert 'raise KeyError("no such thing")' in error.cause
    assert four.one_to_all(1) == [(rank, 1) for rank in range(4)], "the group can still be used"


def test_a_failed_call_fails_the_calls_that_depend_on_it_with_its_own_error(groups):
    four, two = groups
    broken = four.forget_to_write.remote(batch_of(8))
    with pytest.raises(WorkerError, match="declares to write") as caught:
        two.echo(broken)
    assert (caught.value.role, caught.value.method) == ("four", "forget_to_write")
    with pytest.raises(WorkerError, match="declares to write"):
        broken.get()


@pytest.mark.parametrize("groups", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
def test_a_failure_that_nobody_waits_for_is_logged(four, caplog):
    forgotten = four.fail_on.remote(1)
    four.one_to_all(0)
    assert "four.fail_on failed and nobody waited for it" in caplog.text
    assert "no such thing" in caplog.text and forgotten.done()


def test_every_finished_call_is_reported_once_even_if_nobody_waits_for_it(four):
    four.one_to_all(0)
    EVENTS.clear()
    forgotten = four.sleep.remote(0.01)
    assert four.one_to_all(1)
    assert sorted((e.method, e.rank) for e in EVENTS) == [
        (m, r) for m in ("one_to_all", "sleep") for r in range(4)
    ]
    assert all(e.role == "four" and e.finished >= e.started > 0 for e in EVENTS)
    forgotten.get()
    assert len(EVENTS) == 8


def test_ranks_know_their_place(four):
    places = four.place()
    assert [(p["rank"], p["local_rank"]) for p in places] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert {(p["world_size"], p["local_world_size"], p["device"]) for p in places} == {
        (4, 4, "cpu")
    }
