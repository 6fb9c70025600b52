"""A detached run that is killed in any phase goes on from its newest checkpoint, at staleness 0 bit for bit."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import AHEAD, APART, GRPO, kill_driver, metrics_of, tiny_run_settings
from test_interruptions import wait_for_call, wait_for_steps
from test_resume import tensors_of
from test_resume_after_kill import wait_for_file

from verl_like.trainer import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.proof, pytest.mark.timeout(900)]
PPO = [*APART, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "trainer.critic_warmup=2"]
SIDES = {
    "1 maker": PPO,
    "2 makers": [*GRPO, "detached.num_makers=2"],
    "2 trainers": [*PPO, "detached.num_trainers=2"],
}
NUM_STEPS = 12
# The part of a rank that is there, of a checkpoint that is not complete yet.
WRITTEN = "global_step_*.partial/actor/checkpoint/*.safetensors"


def start(folder: Path, settings: list[str]) -> subprocess.Popen:
    with open(folder / "out", "a") as out, open(folder / "err", "a") as err:
        command = [sys.executable, "-m", "verl_like.trainer.main_detached", *settings]
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def kill_in(phase: str, folder: Path, settings: list[str]) -> checkpoint.Checkpoint:
    """Kills a run after a few steps, in a method of a worker or when a file is there; returns its newest checkpoint."""
    killed = start(folder, settings)
    wait_for_steps(folder, killed, num_rows=3)
    if phase == WRITTEN:
        wait_for_file(folder / "runs/latest", killed, phase)
    else:
        wait_for_call(folder, killed, phase)
    kill_driver(killed)
    (run_dir,) = (folder / "runs").glob("2*")
    newest, damages = checkpoint.newest(run_dir)
    assert newest and 1 <= newest.step < NUM_STEPS and not damages
    return newest


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step without its times."""
    times = ("timing_s/", "perf/", "reward/early_ratio", "detached/idle/")
    return [
        {name: value for name, value in row.items() if not name.startswith(times) and "/perf/" not in name}
        for row in metrics_of(folder)
    ]


@pytest.fixture(scope="module", params=SIDES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Iterator:
    """The settings of a run, and the folder of one that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    settings = [*tiny_run_settings(folder, tiny_llama), *SIDES[request.param], "trainer.save_freq=1"]
    settings += [f"trainer.total_training_steps={NUM_STEPS}", "trainer.test_freq=3"]
    assert start(folder, settings).wait(timeout=300) == 0, (folder / "err").read_text()
    return settings, folder


@pytest.mark.parametrize("phase", ["generate_sequences", "update_actor", "export_weights", "load_weights", WRITTEN])
def test_a_run_that_is_killed_is_continued_bit_for_bit(phase: str, whole: tuple[list[str], Path], tmp_path: Path):
    settings, folder = whole
    settings = [*settings, f"trainer.default_local_dir={tmp_path}/runs"]
    newest = kill_in(phase, tmp_path, settings)
    assert start(tmp_path, settings).wait(timeout=300) == 0, (tmp_path / "err").read_text()
    output = (tmp_path / "out").read_text()
    assert f"Continuing {newest.folder.parent} after step {newest.step}." in output
    assert f"Prompts: {4 * newest.step} trained, 0 training, 0 in_buffer, 0 in_flight, 0 again" in output
    assert numbers_of(tmp_path) == numbers_of(folder)
    assert [row["step"] for row in metrics_of(tmp_path) if "actor/lr" in row][-1] == NUM_STEPS
    expected, tensors = tensors_of(folder, NUM_STEPS), tensors_of(tmp_path, NUM_STEPS)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_above_staleness_0_what_was_begun_is_given_out_again_and_no_prompt_is_lost(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, *AHEAD, "trainer.save_freq=1"]
    settings += ["detached.experience_batch_size=1", f"trainer.total_training_steps={NUM_STEPS}"]
    newest = kill_in("generate_sequences", tmp_path, settings)
    ledger = newest.state["ledger"]
    assert ledger["trained"] == [4 * newest.step] and 1 <= len(ledger["unfinished"]) <= 8
    assert sum(ledger["trained"]) + len(ledger["unfinished"]) == ledger["next_number"] and not ledger["dropped"]
    assert start(tmp_path, settings).wait(timeout=300) == 0, (tmp_path / "err").read_text()
    output = (tmp_path / "out").read_text()
    again = f"0 in_flight, {len(ledger['unfinished'])} again, "
    assert f"Prompts: {4 * newest.step} trained, 0 training, 0 in_buffer, {again}" in output
    assert f"Prompts: {4 * NUM_STEPS} trained, 0 training, 0 in_buffer, 0 in_flight, 0 again, 0 not_started" in output
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert [row["detached/trained"] for row in steps] == [4 * row["step"] for row in steps]
    assert max(row["training/staleness/max"] for row in steps) <= 1
