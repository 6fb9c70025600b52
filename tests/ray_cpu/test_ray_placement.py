"""Pools, environments and lifetimes of groups on a real Ray."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
from toy_workers import BrokenConstructor, ToyWorker

from verl_like.single_controller import WorkerError
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from verl_like.single_controller.ray.cluster import node_resources
from verl_like.single_controller.ray.resource_pool import reserve

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TOY = RayClassWithInitArgs(ToyWorker)


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def free_cpus() -> float:
    return sum(node["CPU"] for node in node_resources(total=False).values())


@pytest.fixture
def stop_all():
    """Shuts down the groups and releases the pools put into the list; checks that everything came
    back."""
    used: list[Any] = []
    yield used
    pids = [pid for group in used if isinstance(group, RayWorkerGroup) for pid in group.worker_pids]
    for one in used:
        one.shutdown() if isinstance(one, RayWorkerGroup) else one.release()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    wait_until(lambda: free_cpus() == 8)


def test_a_released_pool_can_be_held_again(stop_all):
    pool = RayResourcePool([1], use_gpu=False)
    first = RayWorkerGroup(pool, TOY)
    pool.release()
    second = RayWorkerGroup(pool, TOY)
    stop_all += [second, pool]
    first.shutdown()  # it held the reservation before: nothing of this one becomes free
    with pytest.raises(ValueError, match="already holds 1 worker group"):
        RayWorkerGroup(pool, TOY)


def test_an_uneven_pool_counts_ranks_node_by_node(stop_all):
    pool = RayResourcePool([2, 1], use_gpu=False)
    group = RayWorkerGroup(
        pool, TOY, role="uneven", name_prefix="toy", worker_env={"TOY_FLAG": "on"}
    )
    stop_all += [group, pool]
    places = group.place()
    assert [p["rank"] for p in places] == [0, 1, 2]
    assert [p["local_rank"] for p in places] == [0, 1, 0]
    assert [p["local_world_size"] for p in places] == [2, 2, 1]
    assert group.environment("TOY_FLAG") == ["on"] * 3
    assert [p["pid"] for p in places] == group.worker_pids
    assert group.worker_names == ["toy_0", "toy_1", "toy_2"]
    assert [ray.get_actor(name) for name in group.worker_names] == group.workers
    # The ranks meet at the group's master address, and 1 + 2 + 3 = 6.
    group.init_process_group()
    assert group.sum_of_ranks() == [6.0, 6.0, 6.0]


def test_two_groups_share_a_pool_as_separate_processes(stop_all):
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=2)
    group = RayWorkerGroup(pool, TOY, role="shared")
    told = RayWorkerGroup(pool, TOY, role="told", worker_env={"OMP_NUM_THREADS": "3"})
    stop_all += [group, told, pool]
    assert not set(group.worker_pids) & set(told.worker_pids)
    assert told.environment("OMP_NUM_THREADS") == ["3"]
    with pytest.raises(ValueError, match=r"already holds 2 worker group\(s\)"):
        RayWorkerGroup(pool, TOY)


def test_the_groups_own_variables_cannot_be_overridden():
    with pytest.raises(ValueError, match=r"sets \['RANK'\], which the group sets itself"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), TOY, worker_env={"RANK": "3"})


def test_a_pool_that_does_not_fit_fails_at_once_with_a_table():
    started = time.monotonic()
    manager = ResourcePoolManager(
        {"train": [6], "rollout": [4]}, {"actor": "train", "gen": "rollout"}, use_gpu=False
    )
    with pytest.raises(ValueError, match="the cluster is too small") as caught:
        manager.create_resource_pool()
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["train,", "node", "0", "0", "6"] in lines and [
        "rollout,",
        "node",
        "0",
        "0",
        "4",
    ] in lines
    assert lines[-2][-6:] == ["2", "/", "2", "8", "/", "8"]
    with pytest.raises(ValueError, match="the cluster is too small"):
        RayResourcePool([3]).get_placement_groups()  # three GPUs, and there are two
    assert time.monotonic() - started < 10


def test_a_pool_whose_resources_others_hold_fails_within_its_deadline(stop_all):
    holder = RayResourcePool([6], use_gpu=False, name_prefix="holder")
    holder.get_placement_groups()
    stop_all.append(holder)
    with pytest.raises(ValueError, match=r"not free within 1 s[\s\S]*2 / 8"):
        RayResourcePool([3], use_gpu=False).get_placement_groups(timeout_s=1)


def test_processes_share_the_cores_with_those_of_other_pools(stop_all):
    pools = [RayResourcePool([1], use_gpu=False), RayResourcePool([2], use_gpu=False)]
    reserve(pools)
    group = RayWorkerGroup(pools[0], TOY)
    stop_all += [group, *pools]
    cores = min(8, len(os.sched_getaffinity(0)))
    assert group.environment("OMP_NUM_THREADS") == [str(max(1, cores // 3))]


def test_the_manager_gives_each_role_its_pool(stop_all):
    manager = ResourcePoolManager(
        {"a": [1, 1], "b": [2]}, {"actor": "a", "ref": "a", "critic": "b"}, use_gpu=False
    )
    manager.create_resource_pool()
    stop_all += manager.resource_pool_dict.values()
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("ref")
    assert manager.get_resource_pool("critic").process_on_nodes == [2]
    assert manager.get_n_gpus() == 0
    of_gpus = ResourcePoolManager({"a": [2, 1], "b": [4]}, {"actor": "a"}, use_gpu=True)
    assert of_gpus.get_n_gpus() == 7
    with pytest.raises(ValueError, match="role 'reward' has no pool"):
        manager.get_resource_pool("reward")
    with pytest.raises(ValueError, match="role actor is mapped to pool 'c'"):
        ResourcePoolManager({"a": [1]}, {"actor": "c"})


def test_colocated_roles_share_processes_and_take_turns(stop_all):
    pool = RayResourcePool([2], use_gpu=False)
    classes = create_colocated_worker_cls(
        {
            "actor": RayClassWithInitArgs(ToyWorker, 2.0),
            "critic": RayClassWithInitArgs(ToyWorker, 3.0),
        }
    )
    host = RayWorkerGroup(pool, classes)
    groups = host.spawn(["actor", "critic"])
    stop_all += [host, pool]
    actor, critic = groups["actor"], groups["critic"]
    assert actor.worker_pids == critic.worker_pids == [p["pid"] for p in critic.place()]
    assert not hasattr(host, "place"), "the methods are on the groups of the roles"
    cores = min(8, len(os.sched_getaffinity(0)))
    assert actor.environment("OMP_NUM_THREADS") == [str(max(1, cores // 2))] * 2
    first, second = actor.sleep.remote(0.3), critic.sleep.remote(0.3)
    for (_, first_ended), (second_started, _) in zip(first.get(), second.get(), strict=True):
        assert second_started >= first_ended
    with pytest.raises(ValueError, match=r"roles \['reward'\] are not on these processes"):
        host.spawn(["reward"])


def test_separate_groups_overlap(stop_all):
    pools = [RayResourcePool([1], use_gpu=False) for _ in range(2)]
    groups = [RayWorkerGroup(pool, TOY) for pool in pools]
    stop_all += [*groups, *pools]
    for group in groups:
        group.place()
    spans = [future.get()[0] for future in [group.sleep.remote(1.0) for group in groups]]
    assert max(started for started, _ in spans) < min(ended for _, ended in spans)


def test_a_constructor_that_raises_is_reported_with_role_and_rank(stop_all):
    pool = RayResourcePool([1], use_gpu=False)
    stop_all.append(pool)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(BrokenConstructor), role="broken")
    with pytest.raises(
        WorkerError,
        match=r"broken rank 0 .* failed in __init__: ValueError: the constructor refuses",
    ):
        group.execute_func_rank_zero(len, [])
    group.shutdown()
    with pytest.raises(RuntimeError, match="broken was shut down"):
        group.execute_func_rank_zero(len, [])


def test_each_rank_of_a_gpu_pool_sees_its_own_gpu_and_ray_remote_classes_are_accepted(stop_all):
    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=3)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(ToyWorker), scale=2.0))
    stop_all += [group, pool]
    assert [place["device"] for place in group.place()] == ["cuda", "cuda"]
    assert sorted(group.environment("CUDA_VISIBLE_DEVICES")) == ["0", "1"]
