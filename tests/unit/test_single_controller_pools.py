"""Ranks of a pool and whether pools fit on nodes, without a cluster."""

import copy
import itertools
import socket

import pytest

from verl_like.single_controller import WorkerError
from verl_like.single_controller.failure import CallTimeout, WorkerDied
from verl_like.single_controller.ray import RayResourcePool
from verl_like.single_controller.ray.cluster import assign
from verl_like.single_controller.worker import reserve_port


def test_local_ranks_follow_from_the_processes_of_each_node():
    pool = RayResourcePool([2, 1, 3])
    assert (pool.world_size, pool.process_on_nodes, pool.store) == (6, [2, 1, 3], [2, 1, 3])
    assert pool.local_rank_list() == [0, 1, 0, 0, 1, 2]
    assert pool.local_world_size_list() == [2, 2, 1, 3, 3, 3]
    assert pool.local_ranks() == [(0, 2), (1, 2), (0, 1), (0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_a_node_has_at_least_one_process(wrong):
    with pytest.raises(ValueError, match="at least one process"):
        RayResourcePool([1, wrong])


def entries(*cpus: float) -> list[dict[str, float]]:
    return [{"CPU": cpu} for cpu in cpus]


def assigned(needed: list[dict[str, float]], *cpus: float) -> list[str] | None:
    """On nodes a, b, c ... of so many CPUs."""
    return assign(needed, dict(zip("abcdefgh", entries(*cpus), strict=False)))


def test_each_entry_is_put_whole_on_one_node_in_any_order():
    assert assigned(entries(4, 4), 8) == ["a", "a"]
    assert assigned(entries(6), 4, 4) is None, "the total would be enough"
    assert assigned(entries(2, 8), 2, 8) == ["a", "b"] and assigned(entries(8, 2), 2, 8) == [
        "b",
        "a",
    ]
    # Putting the largest on the first node that has room (7 on 10) would leave no room for the
    # second 5.
    assert assigned(entries(5, 7, 5), 10, 7) == ["a", "b", "a"]
    alike = {str(i): {"CPU": 8.0} for i in range(39)}
    assert assign(entries(*[5] * 40), alike) is None
    assert assign([], {}) == []


def test_a_way_is_found_where_trying_every_one_finds_it():
    for rooms in itertools.combinations_with_replacement(range(1, 7), 3):
        for sizes in itertools.combinations_with_replacement(range(1, 6), 3):
            ways = itertools.product(range(3), repeat=3)
            filled = (
                [sum(size for size, i in zip(sizes, way, strict=True) if i == n) for n in range(3)]
                for way in ways
            )
            exists = any(
                all(used <= room for used, room in zip(node, rooms, strict=True)) for node in filled
            )
            found = assigned(entries(*sizes), *rooms)
            assert (found is not None) == exists, (sizes, rooms)


def test_gpus_and_cpus_are_both_counted():
    node = {"GPU": 8.0, "CPU": 8.0}
    assert assign([{"GPU": 8, "CPU": 8}], {"a": node}) == ["a"]
    assert assign([{"GPU": 4, "CPU": 12}], {"a": node}) is None
    assert assigned([{"GPU": 1, "CPU": 1}], 64) is None


def test_one_node_too_few_is_seen_at_once_whatever_else_the_nodes_have():
    # By trial of every order, 16 nodes that differ in their free CPUs take longer than anybody
    # waits.
    nodes = {str(i): {"GPU": 8.0, "CPU": 100.0 + i} for i in range(16)}
    assert assign([{"GPU": 8, "CPU": 16}] * 17, nodes) is None
    assert assign([{"GPU": 7, "CPU": 14}] * 16 + [{"GPU": 2, "CPU": 4}], nodes) is None
    assert assigned(entries(*[16] * 25, 1), 60, 61, 62, 63, 59, 58, 57, 56) is None
    assert sorted(assign([{"GPU": 8, "CPU": 16}] * 16, nodes) or []) == sorted(nodes)


def test_a_reserved_port_is_free_for_its_owner_only():
    holder, port = reserve_port()
    with socket.socket() as stranger, pytest.raises(OSError):
        stranger.bind(("", port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
    holder.close()


@pytest.mark.parametrize("kind", [WorkerError, WorkerDied])
def test_errors_keep_their_facts_when_they_are_serialised(kind):
    error = copy.copy(
        kind("actor", 3, "10.0.0.1", 77, "update_actor", "Traceback\nValueError: x\n")
    )
    assert type(error) is kind and (error.role, error.rank, error.pid, error.method) == (
        "actor",
        3,
        77,
        "update_actor",
    )
    assert str(error).startswith("actor rank 3 (node 10.0.0.1, pid 77) ")
    timeout = copy.copy(CallTimeout("actor", "update_actor", 5.0, "rank(s) [1] of 2"))
    assert (
        str(timeout) == "actor.update_actor did not finish within 5 s: waiting for rank(s) [1] of 2"
    )
