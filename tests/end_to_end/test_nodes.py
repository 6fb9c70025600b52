"""Runs across the nodes of a real Ray cluster, none of which has room for a whole run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from runs import AHEAD, GRPO, kill_once, metrics_of, num_steps_logged, tiny_run_settings

pytestmark = [pytest.mark.proof, pytest.mark.ray, pytest.mark.timeout(900)]
UNEVEN = [
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "critic.ppo_mini_batch_size=3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
]


@pytest.fixture
def three_nodes(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Nodes of 2, 2 and 1 CPUs, at the machine's address and two of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("COLUMNS", "200")  # of what the runs print
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    yield cluster
    cluster.shutdown()


def train(module: str, settings: list[str]) -> str:
    """A run to its end, in a process of its own, whose Ray has the settings of the cluster's; what
    it prints."""
    command = [sys.executable, "-m", f"verl_like.trainer.{module}", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def placement(output: str) -> dict[tuple[str, str], str]:
    """The node of each rank of each pool, as the run shows them last."""
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in output.splitlines()
        if line[:1] == "│"
    ]
    return {(pool, rank): node for pool, node, ranks, _, _ in rows for rank in ranks.split(", ")}


def calls(folder: Path, role: str, method: str) -> list[int]:
    """The ranks of a role that finished a method, as the timeline of the run has them."""
    rows = [
        json.loads(line)
        for line in (folder / "runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    return sorted(row["rank"] for row in rows if (row["role"], row["method"]) == (role, method))


def test_actor_critic_and_engines_train_on_different_nodes_and_an_uneven_pool_on_two(
    three_nodes: Cluster, tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *UNEVEN, "placement=separate"]
    settings += ["resource_pool_spec.actor_pool=[1,2]", "resource_pool_spec.critic_pool=[1]"]
    settings += [
        "resource_pool_spec.rollout_pool=[1]",
        "actor_rollout_ref.rollout.weight_transport=gloo",
    ]
    nodes = placement(
        train("main_ppo", [*settings, f"ray_kwargs.ray_init.address={three_nodes.address}"])
    )
    assert len(nodes) == 5 and len(set(nodes.values())) == 3
    assert nodes["actor_pool", "0"] != nodes["actor_pool", "1"] == nodes["actor_pool", "2"]
    assert nodes["actor_pool", "1"] not in (nodes["critic_pool", "0"], nodes["rollout_pool", "0"])
    # Every load compares the fingerprints; the responses say which weights drew them.
    assert calls(tmp_path, "rollout", "load_weights") == [0] * 3
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["training/staleness/max"] for row in steps] == [0, 0]


def test_makers_and_a_trainer_on_different_nodes_account_for_every_prompt_and_a_maker_gets_its_place_again(
    three_nodes: Cluster, tmp_path: Path, tiny_llama: Callable
):
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        *AHEAD,
        *UNEVEN,
        "detached.num_makers=2",
    ]
    settings += ["resource_pool_spec.trainer_pool=[1,2]", "resource_pool_spec.maker_pool=[1]"]
    settings += [
        "detached.experience_batch_size=1",
        "actor_rollout_ref.rollout.weight_transport=gloo",
    ]
    settings += [f"ray_kwargs.ray_init.address={three_nodes.address}"]
    killer = kill_once(
        "ExperienceMakerHolder", signal.SIGKILL, when=lambda: num_steps_logged(tmp_path) >= 2
    )
    output = train("main_detached", settings)  # which takes all 5 CPUs
    assert not killer.is_alive()
    assert output.count("is started again") == 1 and output.count("Placement") == 2
    before, nodes = (placement(part) for part in output.split("is started again"))
    assert nodes == before and len(nodes) == 5 and len(set(nodes.values())) == 3
    trainer = [nodes["trainer_0 trainer_pool", rank] for rank in "012"]
    assert trainer[0] != trainer[1] == trainer[2]
    assert trainer[1] not in [nodes[f"maker_{index} maker_pool", "0"] for index in range(2)]
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    counts = {
        name: steps[-1][f"detached/{name}"]
        for name in ("trained", "in_buffer", "in_flight", "again")
    }
    assert counts == {"trained": 30, "in_buffer": 0, "in_flight": 0, "again": 0}
    assert max(row["training/staleness/max"] for row in steps) <= 1
