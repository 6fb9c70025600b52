"""A tiny PPO run for the end-to-end tests: a random model, eight prompts, two processes a pool."""

import contextlib
import copy
import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from documented_metrics import undocumented
from forked_workers import shared_template
from tiny_experts import CONFIGS
from transformers import AutoModelForCausalLM

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.run_detached import run_detached
from verl_like.trainer.ppo.run_ppo import run_ppo

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(set(solution_str)) / 4, "acc": float("1" in solution_str)}
"""


def data_row(index: int, prompt: str = "12+34", answer: str = "46") -> dict[str, Any]:
    return {
        "data_source": "exact_match",
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def mixture_settings(folder: Path, tiny_llama: Callable) -> list[str]:
    """Overrides of a tiny mixture of experts, with a tokenizer that has a chat template."""
    tokens_of, llama = tiny_llama()
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.vocab_size = llama.config.vocab_size
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = "actor_rollout_ref.model"
    return [f"{model}.path={folder}", f"{model}.tokenizer_path={tokens_of}"]


def tiny_run_settings(folder: Path, tiny_llama: Callable, *, engine: str = "hf") -> list[str]:
    """Overrides of a run of two steps with everything in `folder`; the reward is the share of
    distinct characters."""
    model, _ = tiny_llama()
    rows = [data_row(i, f"{i}+{i + 1}", str(2 * i + 1)) for i in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)
    return [
        "device=cpu",
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        f"custom_reward_function.path={folder}/reward.py",
        f"trainer.default_local_dir={folder}/runs",
    ]


def run_on_ray(settings: list[str], *config_file: str) -> None:
    """A run to its end whose workers are forks of a template, as from the command line.

    Runs of this process share the template.
    """
    assert run_ppo(load_ppo_config(settings, *config_file), shared_template()) == 0


SPLIT = ["placement=split", "trainer.n_gpus_per_node=4"]


def metrics_of(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl of the latest run in `folder`, all of whose metrics docs/metrics.md
    describes. A row that is being written is not among them."""
    lines = (folder / "runs/latest/metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    assert not undocumented({name for row in rows for name in row} - {"step"})
    return rows


def largest_difference(
    folder: Path, expected: Path, num_steps: int | None = None
) -> tuple[float, str]:
    """Between the metrics of the first steps of two runs, relative or, of a number below 1,
    absolute; and its metric.

    Left out are times, and how the rows are divided among ranks.
    """
    of_placement = ("timing_s/", "perf/", "reward/early_ratio", "global_seqlen/")
    rows, others = (metrics_of(each)[:num_steps] for each in (folder, expected))
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    names = [
        [name for name in row if not name.startswith(of_placement) and "/perf/" not in name]
        for row in others
    ]
    return max(
        (abs(row[name] - other[name]) / max(1, abs(other[name])), name)
        for row, other, of_row in zip(rows, others, names, strict=True)
        for name in of_row
    )


APART = ["placement=detached", "trainer.n_gpus_per_node=1"]
GRPO = [*APART, "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true"]
AHEAD = ["trainer.max_staleness=1", "trainer.total_training_steps=5", "trainer.test_freq=5"]


def run_apart(settings: list[str]) -> int:
    """A detached run to its end; its exit code."""
    config = load_config(DetachedConfig, broken_detached_rules, settings)
    return run_detached(config, shared_template())


def processes_of_ours() -> set[psutil.Process]:
    """What this process has started, with the template that its runs share."""
    shared_template()
    return set(psutil.Process().children(recursive=True))


def kill_once(title: str, number: int, *, when: Callable[[], bool]) -> threading.Thread:
    """Sends a signal to the process of this title, once `when` holds and there is one."""

    def kill() -> None:
        deadline = time.monotonic() + 300
        while not when() and time.monotonic() < deadline:
            time.sleep(0.05)
        while time.monotonic() < deadline:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if title in " ".join(child.cmdline()):
                        child.send_signal(number)
                        return

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def kill_driver(process: subprocess.Popen) -> None:
    """Kills a run's own process and waits until those of its workers have ended, which they do by
    themselves.

    Ray's agents would look for another minute.
    """
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    agents = {
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if "Agent" in str(each.info["cmdline"])
    }
    process.kill()
    _, left = psutil.wait_procs([each for each in family if each.pid not in agents], timeout=60)
    assert not left, left
    for agent in [each for each in family if each.pid in agents]:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()


def num_steps_logged(folder: Path) -> int:
    metrics = folder / "runs/latest/metrics.jsonl"
    return (
        sum("actor/loss" in line for line in metrics.read_text().splitlines())
        if metrics.exists()
        else 0
    )
