"""A disk that is full or read-only, at the start of a run or in its middle, loses nothing and is
named.

The disks are small file systems in memory, which only root can mount.
`tests/unit/test_workers_checkpoints.py` writes to a file of limited size instead.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_sft import config_in, model_path, numbers_of

from verl_like.protocol import Metric
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.supervised import SFTConfig
from verl_like.trainer.run import shell as run
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.supervised import run_supervised
from verl_like.trainer.supervised.trainer import SupervisedTrainer
from verl_like.workers.supervised import SFTWorker

assert model_path  # a fixture


def mount(*arguments: str) -> None:
    mounted = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB, where runs are written to."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "none", str(folder))
    yield folder
    while folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, but: int = 0) -> None:
    """Takes all room but that many bytes."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        room = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - but)


def make_read_only(folder: Path) -> None:
    mount("--bind", str(folder), str(folder))
    mount("-o", "remount,bind,ro", str(folder))


@pytest.fixture
def train(
    tmp_path: Path,
    model_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Fine-tunes for six steps in this process, with a checkpoint every second one; returns exit
    code and messages.

    `at_step` is called in the middle of the fourth step with the folder of the run.
    """
    monkeypatch.setattr(run, "start_ray", lambda *_: None)

    def run_here(
        at_step: Callable[[Path], None] | None = None, folder: Path = tmp_path
    ) -> tuple[int, str]:
        def fit(inputs: run_supervised.SupervisedInputs, recorder: RunRecorder) -> None:
            config = inputs.config
            worker = RayClassWithInitArgs(SFTWorker, *run_supervised.worker_arguments(config))
            group = LocalWorkerGroup(worker, role="model")
            trainer = SupervisedTrainer(
                config, inputs.train_dataset, inputs.val_dataset, group, recorder
            )
            trainer.init_workers()
            step = trainer.step

            def step_after() -> dict[str, Metric]:
                if at_step and trainer.global_step == 4:
                    at_step(recorder.run_dir)
                return step()

            trainer.step = step_after
            trainer.fit()

        config = config_in(folder, model_path, "trainer.max_ckpt_to_keep=1")
        code = run.run(
            config, run_supervised.check_inputs, fit, run_supervised.KINDS[SFTConfig].display
        )
        return code, capfd.readouterr().err

    return run_here


def assert_it_goes_on(disk: Path, train: Callable) -> None:
    """The checkpoint of the second step is there, and the run continues with the numbers of one
    that did not end."""
    (run_dir,) = disk.glob("2*")
    newest, damages = checkpoint.newest(run_dir)
    assert newest and newest.step == 2 and not damages
    assert train()[0] == 0
    whole = disk.parent / "whole"
    assert train(folder=whole)[0] == 0
    assert numbers_of(disk.parent) == numbers_of(whole)
    assert [path.name for path in disk.glob("2*")] == [run_dir.name] and checkpoint.steps(
        run_dir
    ) == [6]


def test_a_run_does_not_start_on_a_full_disk(disk: Path, train: Callable):
    fill(disk)
    code, message = train()
    assert (
        code == 2
        and "No space left on device" in message
        and "trainer.default_local_dir" in message
    )
    assert "Traceback" not in message


def test_a_run_does_not_start_in_a_read_only_folder(disk: Path, train: Callable):
    make_read_only(disk)
    code, message = train()
    assert code == 2 and f"trainer.default_local_dir={disk} cannot be written (" in message
    assert (
        "Read-only file system" in message
        and "Traceback" not in message
        and not list(disk.iterdir())
    )


@pytest.mark.parametrize("room", [pytest.param(0, marks=pytest.mark.proof), 300_000])
def test_a_run_whose_disk_becomes_full_ends_and_goes_on_when_there_is_room(
    disk: Path, train: Callable, room: int
):
    code, message = train(at_step=lambda run_dir: fill(disk, but=room))
    assert (
        code == 1
        and "No space left on device" in message
        and "Earlier checkpoints are as they were." in message
    )
    if room:  # for the metrics
        assert (
            "global_step_4.partial/model/checkpoint/rank_00000.safetensors cannot be written"
            in message
        )
    (disk / "ballast").unlink()
    assert_it_goes_on(disk, train)


@pytest.mark.proof
def test_a_run_whose_folder_becomes_read_only_ends_and_goes_on_when_it_is_not(
    disk: Path, train: Callable
):
    code, message = train(at_step=make_read_only)
    assert (
        code == 1
        and "Read-only file system" in message
        and "Earlier checkpoints are as they were" in message
    )
    (run_dir,) = disk.glob("2*")
    code, message = train()
    assert (
        code == 2
        and f"{run_dir} cannot be locked" in message
        and "Read-only file system" in message
    )
    subprocess.run(["umount", str(run_dir)], check=True)
    assert_it_goes_on(disk, train)
