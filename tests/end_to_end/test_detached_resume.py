"""A detached run that is killed in any phase goes on from its newest checkpoint, at staleness 0 bit
for bit."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import AHEAD, APART, GRPO, kill_driver, metrics_of, tiny_run_settings
from test_interruptions import wait_for_call, wait_for_steps
from test_resume import tensors_of
from test_resume_after_kill import wait_for_file

from verl_like.trainer.state import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.proof, pytest.mark.timeout(1800)]
PPO = [
    *APART,
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.critic_warmup=2",
]
SIDES = {
    "1 maker": PPO,
    "2 makers": [*GRPO, "detached.num_makers=2"],
    "2 trainers": [*PPO, "detached.num_trainers=2"],
}
# The part of a rank that is there, of a checkpoint that is not complete yet.
WRITTEN = "global_step_*.partial/actor/checkpoint/*.safetensors"
VALIDATED = "val-core/exact_match/acc/mean@1"
PHASES = ["collect_completions", "update_actor", "export_weights", "load_weights", WRITTEN]


def start(folder: Path, settings: list[str]) -> subprocess.Popen:
    settings = [*settings, f"trainer.default_local_dir={folder}/runs"]
    with open(folder / "out", "a") as out, open(folder / "err", "a") as err:
        command = [sys.executable, "-m", "verl_like.trainer.main_detached", *settings]
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def kill_in(phase: str, folder: Path, settings: list[str], num_rows: int) -> checkpoint.Checkpoint:
    """Kills a run after some rows of metrics, in a method of a worker or when a file is there;
    returns its newest checkpoint."""
    killed = start(folder, settings)
    wait_for_steps(folder, killed, num_rows)
    if phase == WRITTEN:
        wait_for_file(folder / "runs/latest", killed, phase)
    else:
        wait_for_call(folder, killed, phase)
    kill_driver(killed)
    (run_dir,) = (folder / "runs").glob("2*")
    newest, damages = checkpoint.newest(run_dir)
    assert newest and not damages
    return newest


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step without its times."""
    times = ("timing_s/", "perf/", "reward/early_ratio", "detached/idle/")
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(times) and "/perf/" not in name
        }
        for row in metrics_of(folder)
    ]


def join_counts_of_prompts_to_come(row: dict[str, float]) -> None:
    """Puts the sum of the prompts in flight and of those that are not started in their place."""
    if "detached/in_flight" in row:
        row["detached/to_come"] = row.pop("detached/in_flight") + row.pop("detached/not_started")


@pytest.mark.parametrize("sides", SIDES)
def test_a_run_that_is_killed_in_one_phase_after_the_other_is_continued_bit_for_bit(
    sides: str, tmp_path: Path, tiny_llama: Callable
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *SIDES[sides], "trainer.save_freq=1"]
    settings += ["trainer.total_training_steps=30", "trainer.test_freq=3"]
    assert start(whole, settings).wait(timeout=600) == 0, (whole / "err").read_text()
    restored: list[int] = []
    for phase in PHASES:
        newest = kill_in(
            phase, parts, settings, num_rows=len(metrics_of(parts)) + 3 if restored else 3
        )
        restored.append(newest.step)
    assert restored == sorted(restored) and restored[0] >= 1 and restored[-1] < 30
    assert start(parts, settings).wait(timeout=600) == 0, (parts / "err").read_text()
    output = (parts / "out").read_text()
    for step in restored:
        assert f"Continuing {newest.folder.parent} after step {step}." in output
        counts = f"Prompts: {4 * step} trained, 0 training, 0 in_buffer, 0 in_flight, "
        again = re.search(rf"{counts}(\d+) again", output)
        # The first of two trainers may push weights, of which a maker begins a step, before the
        # other one is done.
        assert again and int(again[1]) in ([0, 4] if sides == "2 trainers" else [0])
    rows, expected_rows = numbers_of(parts), numbers_of(whole)
    # Which versions the first maker has as a validation is due depends on how fast it is
    if sides == "2 makers":
        both = {row["step"] for row in rows if VALIDATED in row} & {
            row["step"] for row in expected_rows
        }
        rows, expected_rows = (
            [row for row in each if VALIDATED not in row or row["step"] in both]
            for each in (rows, expected_rows)
        )
    # The first of two trainers may push weights before the other is done, as above.
    if sides == "2 trainers":
        for row in [*rows, *expected_rows]:
            join_counts_of_prompts_to_come(row)
    assert rows == expected_rows
    assert [row["step"] for row in metrics_of(parts) if "actor/lr" in row][-1] == 30
    expected, tensors = tensors_of(whole, 30), tensors_of(parts, 30)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_above_staleness_0_what_was_begun_is_given_out_again_and_no_prompt_is_lost(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, *AHEAD, "trainer.save_freq=1"]
    settings += ["detached.experience_batch_size=1", "trainer.total_training_steps=12"]
    newest = kill_in("collect_completions", tmp_path, settings, num_rows=3)
    ledger = newest.state["ledger"]
    assert ledger["trained"] == [4 * newest.step] and 1 <= len(ledger["unfinished"]) <= 8
    assert (
        sum(ledger["trained"]) + len(ledger["unfinished"]) == ledger["next_number"]
        and not ledger["dropped"]
    )
    assert start(tmp_path, settings).wait(timeout=300) == 0, (tmp_path / "err").read_text()
    output = (tmp_path / "out").read_text()
    again = f"0 in_flight, {len(ledger['unfinished'])} again, "
    assert f"Prompts: {4 * newest.step} trained, 0 training, 0 in_buffer, {again}" in output
    assert (
        "Prompts: 48 trained, 0 training, 0 in_buffer, 0 in_flight, 0 again, 0 not_started"
        in output
    )
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["detached/trained"] for row in steps] == [4 * row["step"] for row in steps]
    assert max(row["training/staleness/max"] for row in steps) <= 1
