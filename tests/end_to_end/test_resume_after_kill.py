"""A run that is killed in any phase is continued, on Ray, with the numbers of one that is not."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import SPLIT, kill_driver, metrics_of, tiny_run_settings
from test_interruptions import DEADLINE_S, wait_for_call, wait_for_steps
from test_resume import numbers_of, tensors_of

from verl_like.trainer.state import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.proof, pytest.mark.timeout(1800)]
PHASES = [
    "collect_completions",
    "compute_log_prob",
    "compute_ref_log_prob",
    "compute_values",
    "update_critic",
]
PHASES += ["update_actor", "load_weights"]
# The file that is there: the folder of a checkpoint whose state is being copied, and the part of a
# rank, not committed.
FILES = ["global_step_*.partial", "global_step_*.partial/actor/checkpoint/*.safetensors"]
PLACEMENTS = {"colocated": ["trainer.n_gpus_per_node=2"], "split": SPLIT}


def start(folder: Path, settings: list[str]) -> subprocess.Popen:
    settings = [*settings, f"trainer.default_local_dir={folder}/runs"]
    with open(folder / "out", "a") as out, open(folder / "err", "a") as err:
        command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *settings]
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def wait_for_file(run_dir: Path, process: subprocess.Popen, pattern: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not list(run_dir.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def updates_of(folder: Path) -> list[tuple[int, str, str]]:
    """Step, process and method of each update in the timeline."""
    rows = [
        json.loads(line)
        for line in (folder / "runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    return sorted(
        (row["step"], row["process"], row["method"])
        for row in rows
        if row["method"].startswith("update_")
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_that_is_killed_in_one_phase_after_the_other_is_continued_bit_for_bit(
    placement: str, tmp_path: Path, tiny_llama: Callable
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *PLACEMENTS[placement],
        "trainer.total_training_steps=60",
    ]
    settings += ["trainer.save_freq=1", "trainer.test_freq=2", "algorithm.kl_ctrl.type=adaptive"]
    settings += ["algorithm.use_kl_in_reward=true"]
    assert start(whole, settings).wait(timeout=600) == 0, (whole / "err").read_text()
    restored: list[tuple[str, int, int]] = []
    for phase in [*PHASES, *FILES, "a rank"]:
        killed = start(parts, settings)
        wait_for_steps(parts, killed, num_rows=restored[-1][2] + 3 if restored else 3)
        if phase == "a rank":
            wait_for_call(parts, killed, "update_actor").kill()
            assert (
                killed.wait(timeout=DEADLINE_S) == 1
                and "died during" in (parts / "err").read_text()
            )
        elif phase in FILES:
            wait_for_file(parts / "runs/latest", killed, phase)
            kill_driver(killed)
        else:
            wait_for_call(parts, killed, phase)
            kill_driver(killed)
        (run_dir,) = (parts / "runs").glob("2*")
        newest, damages = checkpoint.newest(run_dir)
        assert newest and not damages
        restored.append((phase, metrics_of(parts)[-1]["step"], newest.step))
        # At most the step that ran is lost, and the one whose checkpoint was being written.
        assert restored[-1][1] - newest.step in (0, 1), restored
    assert start(parts, settings).wait(timeout=600) == 0, (parts / "err").read_text()
    for _, _, step in restored:
        assert f"Continuing {run_dir} after step {step}." in (parts / "out").read_text()
    assert numbers_of(parts) == numbers_of(whole)
    assert len(metrics_of(parts)) == 61 and updates_of(parts) == updates_of(whole)
    expected = tensors_of(whole, 60)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in tensors_of(parts, 60).items()
    )
