"""Pools on nodes of different sizes, on a real Ray of several nodes."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from toy_workers import ToyWorker

from verl_like.single_controller.failure import PlacementError, WorkerStopped
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    node_watch,
    process_handles,
)
from verl_like.trainer.detached.run_detached import check_shared_memory

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes(ray_folder: Path) -> Iterator[Cluster]:
    """Nodes of 8 and 4 CPUs."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=4, node_ip_address="127.0.0.2")
    path = {"PYTHONPATH": ":".join(map(str, Path(__file__).parents[:2]))}  # for toy_workers
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": path},
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def cpus_of_ranks(pool: RayResourcePool) -> list[float]:
    """The CPUs of each rank's node."""
    sizes = {node["NodeID"]: node["Resources"]["CPU"] for node in ray.nodes()}
    tables = {group: ray.util.placement_group_table(group) for group in pool.get_placement_groups()}
    return [sizes[tables[group]["bundles_to_node_id"][index]] for group, index in pool.take()]


def placed(spec: dict[str, list[int]]) -> dict[str, list[float]]:
    """The CPUs of the node of each rank of each pool; the pools are released."""
    manager = ResourcePoolManager(spec, {}, use_gpu=False)
    manager.create_resource_pool()
    pools = manager.resource_pool_dict
    places = {name: cpus_of_ranks(pool) for name, pool in pools.items()}
    for pool in pools.values():
        pool.release()
    return places


def test_pools_of_different_sizes_find_their_nodes_in_any_order(nodes):
    assert placed({"a": [4], "b": [8]}) == {"a": [4.0] * 4, "b": [8.0] * 8}
    assert placed({"a": [4, 8]}) == {"a": [4.0] * 4 + [8.0] * 8}
    assert placed({"a": [8], "b": [3], "c": [1]}) == {"a": [8.0] * 8, "b": [4.0] * 3, "c": [4.0]}
    alone = RayResourcePool([4, 8], use_gpu=False)
    assert cpus_of_ranks(alone) == [4.0] * 4 + [8.0] * 8
    alone.release()


def test_pools_that_are_reserved_at_the_same_time_find_the_nodes_that_others_left(nodes):
    pools = [RayResourcePool([4], use_gpu=False) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = sorted(cpus for places in threads.map(cpus_of_ranks, pools) for cpus in places)
    assert found == [4.0] * 4 + [8.0] * 8
    for pool in pools:
        pool.release()


def test_pools_that_do_not_share_a_node_are_refused_for_weights_in_shared_memory(nodes):
    manager = ResourcePoolManager({"a": [8], "b": [3], "c": [1]}, {}, use_gpu=False)
    manager.create_resource_pool()
    pools = manager.resource_pool_dict
    check_shared_memory([pools["b"], pools["c"]])
    with pytest.raises(
        PlacementError, match=r"there are a on [\d.]+; c on 127\.0\.0\.2: set gloo or object_store"
    ):
        check_shared_memory([pools["a"], pools["c"]])
    for pool in pools.values():
        pool.release()


@pytest.mark.proof
def test_a_rank_on_another_node_that_is_stopped_is_named_with_its_node(
    nodes, monkeypatch: pytest.MonkeyPatch
):
    for module in (node_watch, process_handles):
        monkeypatch.setattr(module, "LOOK_S", 1.0)
    pools = [RayResourcePool([8], use_gpu=False), RayResourcePool([1], use_gpu=False)]
    pools[0].get_placement_groups()  # all of the driver's node
    group = RayWorkerGroup(pools[1], RayClassWithInitArgs(ToyWorker), role="apart")
    (pid,) = group.worker_pids
    future = group.sleep.remote(100)
    process = psutil.Process(pid)
    process.suspend()
    with pytest.raises(
        WorkerStopped, match=rf"apart rank 0 \(node 127\.0\.0\.2, pid {pid}\) was stopped"
    ):
        future.get(timeout=90)
    _, alive = psutil.wait_procs([process], timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    for pool in pools:
        pool.release()


@pytest.mark.proof
def test_every_order_of_entries_that_fills_three_nodes_is_placed(nodes):
    nodes.add_node(num_cpus=6)
    for entries in itertools.permutations([5, 3, 6, 4]):  # full nodes are 5 + 3, 6 and 4 alone
        places = placed({"first": list(entries[:2]), "second": list(entries[2:])})
        node_of = {5: 8.0, 3: 8.0, 6: 6.0, 4: 4.0}
        assert places["first"] + places["second"] == [node_of[n] for n in entries for _ in range(n)]
