"""Runs on a real Ray of several nodes on one machine, which they join by its address."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from runs import metrics_of, tiny_run_settings

from verl_like.trainer.config.compose import load_config
from verl_like.trainer.detached.config import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.run_detached import DetachedRun, run_detached

pytestmark = [pytest.mark.proof, pytest.mark.ray]


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two nodes of 2 CPUs, each with an IP address of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    args = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def test_detached_training_runs_across_nodes_with_an_uneven_pool(
    two_nodes: str, tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), "placement=detached", "algorithm.adv_estimator=grpo"]
    settings += ["algorithm.rollout_correction.bypass_mode=true", "trainer.n_gpus_per_node=1"]
    settings += ["resource_pool_spec.trainer_pool=[2,1]", "data.train_batch_size=6"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=3", "trainer.test_freq=-1"]
    settings += [f"ray_kwargs.ray_init.address={two_nodes}"]
    nodes: set[str] = set()
    finish = DetachedRun.finish

    def seen_at_the_end(run: DetachedRun) -> None:
        tables = ray.util.placement_group_table().values()
        nodes.update(node for table in tables for node in table["bundles_to_node_id"].values())
        finish(run)

    monkeypatch.setattr(DetachedRun, "finish", seen_at_the_end)
    assert run_detached(load_config(DetachedConfig, broken_detached_rules, settings)) == 0
    assert len(nodes) == 2
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["detached/trained"] for row in steps] == [6, 12]
