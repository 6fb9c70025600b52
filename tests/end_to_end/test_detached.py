"""Detached training: makers and trainers as drivers of their own, on a real Ray."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import metrics_of, run_on_ray, tiny_run_settings
from safetensors.torch import load_file

from verl_like.trainer import worker_template
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.detached.config import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.run_detached import run_detached
from verl_like.trainer.main_ppo import WORKERS

pytestmark = pytest.mark.ray
APART = ["placement=detached", "trainer.n_gpus_per_node=1"]
GRPO = [*APART, "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true"]


def run_apart(settings: list[str]) -> int:
    """A detached run to its end; its exit code."""
    config = load_config(DetachedConfig, broken_detached_rules, settings)
    return run_detached(config, worker_template.start(WORKERS))


def numbers(rows: list[dict]) -> list[dict]:
    """The metrics of each step that are no times."""
    times = ("timing_s/", "perf/", "actor/perf/", "critic/perf/", "reward/early_ratio", "detached/", "training/epoch")
    return [{name: value for name, value in row.items() if not name.startswith(times)} for row in rows]


def test_at_staleness_0_a_detached_run_equals_the_synchronous_one_bit_for_bit(tmp_path: Path, tiny_llama: Callable):
    runs = {}
    for name in ("synchronous", "detached"):
        (tmp_path / name).mkdir()
        settings = [*tiny_run_settings(tmp_path / name, tiny_llama), *APART, "algorithm.use_kl_in_reward=true"]
        settings += ["trainer.total_training_steps=3", "algorithm.kl_ctrl.kl_coef=0.2"]
        if name == "synchronous":
            run_on_ray(settings)
        else:
            assert run_apart(settings) == 0
        runs[name] = metrics_of(tmp_path / name)
    steps = {name: [row for row in numbers(rows) if "actor/loss" in row] for name, rows in runs.items()}
    assert len(steps["detached"]) == 3
    for synchronous, detached in zip(steps["synchronous"], steps["detached"], strict=True):
        shared = synchronous.keys() & detached.keys() - {name for name in synchronous if name.startswith("val-")}
        assert shared > {
            "actor/loss",
            "critic/loss",
            "critic/values/mean",
            "actor/reward_kl_penalty",
            "actor/grad_norm",
        }
        assert {name: synchronous[name] for name in shared} == {name: detached[name] for name in shared}
    for role in ("actor", "critic"):
        model = f"runs/latest/global_step_3/{role}/huggingface/model.safetensors"
        synchronous, detached = (load_file(tmp_path / name / model) for name in runs)
        assert synchronous.keys() == detached.keys()
        assert all((synchronous[name] == detached[name]).all() for name in synchronous)


def kill_once(title: str, number: int, *, when: Callable[[], bool]) -> threading.Thread:
    """Sends a signal to the process of this title, once `when` holds."""

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not when() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process().children(recursive=True)
        (process,) = [child for child in children if title in " ".join(child.cmdline())]
        process.send_signal(number)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def num_steps_logged(folder: Path) -> int:
    metrics = folder / "runs/latest/metrics.jsonl"
    return sum("actor/loss" in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0


AHEAD = ["detached.max_staleness=1", "trainer.total_training_steps=5", "trainer.test_freq=5"]


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
