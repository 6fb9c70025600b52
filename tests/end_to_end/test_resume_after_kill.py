"""A run that is killed in any phase is continued, on Ray, with the numbers of one that is not."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from runs import SPLIT, metrics_of, tiny_run_settings
from test_interruptions import wait_for_call, wait_for_steps
from test_resume import numbers_of, tensors_of

from verl_like.trainer import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.proof]
PLACEMENTS = {"colocated": ["trainer.n_gpus_per_node=2"], "split": SPLIT}


def start(folder: Path, settings: list[str]) -> subprocess.Popen:
    with open(folder / "out", "a") as out, open(folder / "err", "a") as err:
        command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *settings]
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


@pytest.fixture(scope="module", params=PLACEMENTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Iterator:
    """The settings of a run of twelve steps, and the folder of one that was not killed."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = [*tiny_run_settings(folder, tiny_llama), *PLACEMENTS[request.param], "trainer.total_training_steps=12"]
    settings += ["trainer.save_freq=1", "trainer.test_freq=2", "algorithm.kl_ctrl.type=adaptive"]
    settings += ["algorithm.use_kl_in_reward=true"]
    assert start(folder, settings).wait(timeout=300) == 0, (folder / "err").read_text()
    return settings, folder


@pytest.mark.parametrize(
    "method", ["generate_sequences", "update_actor", "update_critic", "load_weights", "save_checkpoint"]
)
def test_a_run_that_is_killed_is_continued_bit_for_bit(method: str, whole: tuple[list[str], Path], tmp_path: Path):
    settings, folder = whole
    settings = [*settings, f"trainer.default_local_dir={tmp_path}/runs"]
    killed = start(tmp_path, settings)
    wait_for_steps(tmp_path, killed, num_rows=3)
    wait_for_call(tmp_path, killed, method)
    family = [*psutil.Process(killed.pid).children(recursive=True), psutil.Process(killed.pid)]
    killed.kill()
    psutil.wait_procs(family, timeout=60)
    (run_dir,) = (tmp_path / "runs").glob("2*")
    newest, damages = checkpoint.newest(run_dir)
    assert newest and newest.step >= 1 and not damages
    assert start(tmp_path, settings).wait(timeout=300) == 0, (tmp_path / "err").read_text()
    assert f"Continuing {run_dir} after step {newest.step}." in (tmp_path / "out").read_text()
    assert numbers_of(tmp_path) == numbers_of(folder)
    assert len(metrics_of(tmp_path)) == 13
    expected = tensors_of(folder, 12)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(tmp_path, 12).items())
