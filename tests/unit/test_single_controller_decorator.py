"""What @register and the dispatch registry accept and refuse, when a class is defined."""

import pytest

from verl_like.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.dispatch import Mesh
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs

BUILT_IN = {name: mode for name, mode in vars(Dispatch).items() if name.isupper()}
WHOLE_ARGUMENTS = {"RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL"}


def test_the_modes_are_those_of_the_design():
    assert {name for name in BUILT_IN if not name.startswith("TOY")} >= WHOLE_ARGUMENTS | {
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
    }


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_mode_goes_with_all_ranks_and_splitting_modes_not_with_rank_zero(name):
    register(dispatch_mode=BUILT_IN[name], execute_mode=Execute.ALL)
    if name in WHOLE_ARGUMENTS:
        register(dispatch_mode=BUILT_IN[name], execute_mode=Execute.RANK_ZERO)
    else:
        with pytest.raises(
            ValueError, match=f"{name} splits its arguments.*use Dispatch.RANK_ZERO"
        ):
            register(dispatch_mode=BUILT_IN[name], execute_mode=Execute.RANK_ZERO)


def test_a_mesh_mode_does_not_go_with_rank_zero():
    with pytest.raises(ValueError, match=r"MESH\[dp\] splits its arguments"):
        register(
            dispatch_mode=make_nd_compute_dataproto_dispatch_fn("dp"),
            execute_mode=Execute.RANK_ZERO,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dispatch_mode": "ONE_TO_ALL"}, "dispatch_mode is a Dispatch"),
        ({"dispatch_mode": {"dispatch_fn": print}}, "dict with dispatch_fn and collect_fn"),
        ({"execute_mode": "all"}, "execute_mode is Execute"),
        ({"reads": "input_ids"}, "reads of .* is a list of column names"),
        ({"writes": [1]}, "writes of .* is a list of column names"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        register(**arguments)(lambda self: None)


def test_async_generators_are_refused():
    async def produce(self):
        yield 1

    with pytest.raises(ValueError, match="is an async generator"):
        register()(produce)


def test_a_registered_method_stays_an_ordinary_method():
    class Plain(Worker):
        @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False, reads=["input_ids", "uid?"])
        def double(self, x):
            return 2 * x

    assert Plain().double(4) == 8
    spec = registered_methods(Plain)["double"]
    assert (spec.blocking, spec.reads, spec.read_columns) == (
        False,
        ("input_ids", "uid?"),
        ("input_ids", "uid"),
    )


def test_user_modes_are_named_once_and_in_capitals():
    with pytest.raises(ValueError, match=r"Dispatch\.ONE_TO_ALL exists already"):
        register_dispatch_mode("ONE_TO_ALL", print, print)
    with pytest.raises(ValueError, match="named in capitals"):
        register_dispatch_mode("my mode", print, print)


@pytest.mark.parametrize(
    ("of_ranks", "got"),
    [([7], "list of 1"), ((7, 8, 9), "tuple of 3"), (7, "int")],
    ids=["too few", "too many", "no list"],
)
def test_a_dispatch_function_that_returns_no_entry_for_each_rank_is_an_error(of_ranks, got):
    class Custom(Worker):
        @register(
            dispatch_mode={
                "dispatch_fn": lambda group, x: ((of_ranks,), {}),
                "collect_fn": lambda group, out: out,
            }
        )
        def method(self, x):
            return x

    with pytest.raises(
        ValueError,
        match=r"worker\.method must return one list per argument with one entry for each of 2 "
        rf"ranks, got {got}$",
    ):
        LocalWorkerGroup(ClassWithInitArgs(Custom), 2).method(1)


def test_a_method_named_like_an_attribute_of_groups_is_refused():
    class Clash(Worker):
        @register()
        def shutdown(self):
            return None

    with pytest.raises(
        ValueError, match=r"Clash\.shutdown has the name of a worker group's attribute"
    ):
        LocalWorkerGroup(ClassWithInitArgs(Clash))


def test_a_class_that_is_no_worker_is_refused():
    with pytest.raises(ValueError, match="dict of role worker is not a Worker"):
        LocalWorkerGroup(ClassWithInitArgs(dict))


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        ([(0, True), (0, True)], "exactly one rank of each must be collected"),
        ([(0, True), (1, False)], "exactly one rank of each must be collected"),
        ([(0, True), (2, True)], "dp_ranks must count up from 0 without gaps"),
    ],
)
def test_a_mesh_needs_one_collected_rank_for_each_shard(coordinates, message):
    with pytest.raises(ValueError, match=message):
        Mesh.from_coordinates("actor", "dp", coordinates)


def test_a_mesh_collects_in_the_order_of_shards_not_of_ranks():
    mesh = Mesh.from_coordinates("actor", "dp", [(1, True), (0, False), (0, True), (1, False)])
    assert (mesh.dp_size, mesh.dp_ranks, mesh.collect_ranks) == (2, [1, 0, 0, 1], [2, 0])


def test_a_mesh_is_registered_once_per_rank():
    worker = Worker()
    worker._register_dispatch_collect_info("dp", 0, True)
    with pytest.raises(ValueError, match="mesh 'dp' is registered already on rank 0"):
        worker._register_dispatch_collect_info("dp", 0, True)
