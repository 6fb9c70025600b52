"""The layouts of docs/placement.md for 16 and 32 GPUs, on a real Ray of nodes with 8 GPUs each
(counted, not used)."""

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_like.single_controller.ray.cluster import node_resources
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.workers import build_resource_pools

PAGE = (Path(__file__).parents[2] / "docs/placement.md").read_text()
ALL_ROLES = [
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.model.path=m",
    "algorithm.use_kl_in_reward=true",
    "reward_model.enable=true",
    "reward_model.model.path=j",
]
NODE = {"num_cpus": 8, "num_gpus": 8}
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(ray_folder: Path) -> Iterator[Cluster]:
    """Two nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote(num_cpus=1, num_gpus=1)
def own_gpus() -> tuple[str, list[int]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), [int(gpu) for gpu in ray.get_gpu_ids()]


@pytest.mark.parametrize("gpus", [16, pytest.param(32, marks=pytest.mark.proof)])
def test_a_layout_takes_every_gpu_of_its_nodes_once(gpus: int, cluster: Cluster):
    for _ in range(len(ray.nodes()), gpus // 8):
        cluster.add_node(**NODE)
    command = re.search(rf"^{gpus} GPUs[^`]*```bash\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)[1]
    config = load_ppo_config([*ALL_ROLES, *shlex.split(command.replace("\\\n", " "))])
    manager = build_resource_pools(config)
    manager.create_resource_pool()
    assert set(manager.mapping) == {"actor", "rollout", "ref", "critic", "reward_model"}
    pools = manager.resource_pool_dict
    bundles = {name: pool.take() for name, pool in pools.items()}
    assert {name: len(taken) for name, taken in bundles.items()} == {
        name: sum(sizes) for name, sizes in config.resource_pool_spec.items()
    }
    deadline = time.monotonic() + 30  # nodes report what they have left with a delay
    while (left := [node["GPU"] for node in node_resources(total=False).values()]) and any(left):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert left == [0] * (gpus // 8)
    # A task in the last process of each pool: on the node of its entry, with a GPU that no other
    # has.
    places = []
    for taken in bundles.values():
        group, index = taken[-1]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        node = ray.util.placement_group_table(group)["bundles_to_node_id"][index]
        places.append((node, own_gpus.options(scheduling_strategy=strategy).remote()))
    seen = [(node, *ray.get(place, timeout=60)) for node, place in places]
    assert all(node == found and len(own) == 1 for node, found, own in seen)
    assert len({(node, *own) for node, _, own in seen}) == 5
    for pool in pools.values():
        pool.release()
