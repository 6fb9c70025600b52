"""A run that is killed at any operation on the file system of a save goes on as if it had not been, in one process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sft import config_in, model_path, numbers_of

from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.resume import find_run
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.supervised import run_supervised
from verl_like.trainer.supervised.config import SFTConfig
from verl_like.trainer.supervised.trainer import SupervisedTrainer
from verl_like.workers.supervised import SFTWorker

assert model_path  # a fixture
STEPS = ["trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1", "trainer.test_freq=-1"]
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync"}


def trainer_of(config: SFTConfig) -> SupervisedTrainer:
    """A trainer whose worker is in this process, of a new run or of the one that goes on."""
    inputs = run_supervised.check_inputs(config, None)
    worker = RayClassWithInitArgs(SFTWorker, *run_supervised.worker_arguments(config))
    recorder = RunRecorder(config, run_supervised.KINDS[SFTConfig].display, find_run(config)[0])
    group = LocalWorkerGroup(worker, role="model")
    trainer = SupervisedTrainer(config, inputs.train_dataset, inputs.val_dataset, group, recorder)
    trainer.init_workers()
    return trainer


def finish(config: SFTConfig) -> None:
    trainer = trainer_of(config)
    trainer.fit()
    trainer.recorder.close("Done.")


def train_and_die(config: SFTConfig, operation: int, last: int) -> None:
    """A process dies at an operation after the save of the second step began, or at last when that is committed."""
    trainer, count = trainer_of(config), 0

    def die(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS and (event != "open" or "global_step" in str(arguments[0])):
            count += 1
            if count == operation:
                os.write(last, f"{event} {Path(arguments[0]).name if arguments else ''}".encode())
                os._exit(9)

    save, next_step, fsync = trainer.save, trainer.next_step, os.fsync

    def save_and_count() -> Path:
        if trainer.global_step == 2:
            trainer.recorder.commit_checkpoint(wait=True)  # that of the first step
            sys.addaudithook(die)
        return save()

    def next_step_or_end() -> dict[str, float]:
        if trainer.global_step == 3:
            trainer.recorder.commit_checkpoint(wait=True)
            os._exit(0)
        return next_step()

    os.fsync = lambda descriptor: (sys.audit("os.fsync"), fsync(descriptor))[1]  # Python has no audit event for it
    trainer.save, trainer.next_step = save_and_count, next_step_or_end
    trainer.fit()


def in_a_fork(action: Callable[..., None], *arguments: Any) -> int:
    """The exit code of the action in a process of its own."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    action(*arguments)
    os._exit(0)


def kill_and_continue(parent: Path, model_path: str) -> None:
    """A run for each operation, and one that is not killed; in a process that itself has run nothing."""
    assert in_a_fork(finish, config_in(parent / "whole", model_path, *STEPS)) == 0
    code = 9
    while code == 9:
        folder = parent / str(len(list(parent.iterdir())))
        config = config_in(folder, model_path, *STEPS)
        with open(folder / "killed_at", "wb") as file:
            code = in_a_fork(train_and_die, config, int(folder.name), file.fileno())
        assert code in (0, 9)
        run, _ = find_run(config)
        assert run
        (folder / "restored").write_text(str(run.checkpoint.step))
        run.lock.close()
        assert in_a_fork(finish, config) == 0


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_at_any_operation_of_a_save_is_continued_bit_for_bit(tmp_path: Path, model_path: str):
    parent = tmp_path / "runs"
    parent.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(parent), model_path], check=True, env=environment, timeout=1700)
    expected = parent / "whole/runs/latest/global_step_3"
    operations, restored = [], []
    for number in range(1, len(list(parent.iterdir()))):
        folder = parent / str(number)
        operations.append((folder / "killed_at").read_text())
        restored.append(int((folder / "restored").read_text()))
        assert numbers_of(folder) == numbers_of(parent / "whole"), operations
        (run_dir,) = (folder / "runs").glob("2*")
        assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_3"]
        for file in expected.rglob("*.safetensors"):
            assert (run_dir / "global_step_3" / file.relative_to(expected)).read_bytes() == file.read_bytes(), (
                operations
            )
    # It is the second step's checkpoint that counts as soon as its folder has its name.
    named = operations.index("os.rename global_step_2.partial") + 1
    assert restored == [1] * named + [2] * (len(restored) - named)
    assert named > 20 and len(restored) - named > 5, list(zip(operations, restored, strict=True))


if __name__ == "__main__":
    kill_and_continue(Path(sys.argv[1]), sys.argv[2])
