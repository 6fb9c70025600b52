"""Detached training: makers and trainers as drivers of their own, on a real Ray."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import AHEAD, APART, GRPO, kill_once, metrics_of, num_steps_logged, run_apart, run_on_ray, tiny_run_settings
from safetensors.torch import load_file

pytestmark = pytest.mark.ray


def numbers(rows: list[dict]) -> list[dict]:
    """The metrics of each step that are no times."""
    times = ("timing_s/", "perf/", "actor/perf/", "critic/perf/", "reward/early_ratio", "detached/", "training/epoch")
    return [{name: value for name, value in row.items() if not name.startswith(times)} for row in rows]


PPO = [*APART, "algorithm.use_kl_in_reward=true", "trainer.total_training_steps=3", "algorithm.kl_ctrl.kl_coef=0.2"]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Path:
    """The folder of a synchronous run."""
    folder = tmp_path_factory.mktemp("synchronous")
    run_on_ray([*tiny_run_settings(folder, tiny_llama), *PPO])
    return folder


@pytest.mark.parametrize(
    "transport",
    ["object_store", *(pytest.param(name, marks=pytest.mark.proof) for name in ("shared_memory", "gloo"))],
)
def test_at_staleness_0_a_detached_run_equals_the_synchronous_one_bit_for_bit(
    transport: str, synchronous: Path, tmp_path: Path, tiny_llama: Callable
):
    by_transport = f"actor_rollout_ref.rollout.weight_transport={transport}"
    assert run_apart([*tiny_run_settings(tmp_path, tiny_llama), *PPO, by_transport]) == 0
    folders = {"synchronous": synchronous, "detached": tmp_path}
    steps = {
        name: [row for row in numbers(metrics_of(folder)) if "actor/loss" in row] for name, folder in folders.items()
    }
    assert len(steps["detached"]) == 3
    for expected, found in zip(steps["synchronous"], steps["detached"], strict=True):
        shared = expected.keys() & found.keys() - {name for name in expected if name.startswith("val-")}
        assert shared > {
            "actor/loss",
            "critic/loss",
            "critic/values/mean",
            "actor/reward_kl_penalty",
            "actor/grad_norm",
        }
        assert {name: expected[name] for name in shared} == {name: found[name] for name in shared}
    for role in ("actor", "critic"):
        model = f"runs/latest/global_step_3/{role}/huggingface/model.safetensors"
        expected, found = (load_file(folder / model) for folder in folders.values())
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected)


def test_a_maker_that_is_killed_loses_no_prompt_and_is_started_again(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, *AHEAD, "detached.experience_batch_size=1"]
    killer = kill_once("ExperienceMakerHolder", signal.SIGKILL, when=lambda: num_steps_logged(tmp_path) >= 2)
    assert run_apart(settings) == 0
    assert not killer.is_alive()
    output = capsys.readouterr().out
    assert "maker_0 failed and is started again: maker_0 rank 0" in output
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    counts = {name: steps[-1][f"detached/{name}"] for name in ("trained", "in_buffer", "in_flight", "again")}
    assert counts == {"trained": 20, "in_buffer": 0, "in_flight": 0, "again": 0}
    assert max(row["training/staleness/max"] for row in steps) <= 1
