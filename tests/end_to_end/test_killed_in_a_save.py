"""A run that is killed at any operation on the file system of a save goes on as if it had not been,
in one process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kill_points import die_at, in_a_fork
from test_sft import config_in, model_path, numbers_of, run_here, trainer_in

from verl_like.protocol import Metric
from verl_like.trainer.config.supervised import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import find_run
from verl_like.trainer.supervised.run_supervised import check_inputs

assert model_path  # a fixture
STEPS = [
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=1",
    "trainer.test_freq=-1",
]
SCHEMAS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}


def train_and_die(
    config: SupervisedConfig, step: int, operation: int | str, killed_at: Path
) -> None:
    """A process is killed at an operation after the save of the step began, or ends when that is
    committed."""
    trainer = trainer_in(config)
    save, step_of_loop, recorder = trainer.save, trainer.step, trainer.recorder

    def save_and_count() -> Path:
        if trainer.global_step == step:
            recorder.commit_checkpoint(wait=True)  # that of the step before
            die_at(operation, killed_at, within="global_step")
        return save()

    def step_or_end() -> dict[str, Metric]:
        if trainer.global_step > step:
            recorder.commit_checkpoint(wait=True)
            os._exit(0)
        return step_of_loop()

    trainer.save, trainer.step = save_and_count, step_or_end
    trainer.fit()


def look_and_continue(config: SupervisedConfig, restored: Path) -> None:
    """Continues a run, or begins anew where it has no checkpoint; `restored` is given the step or
    None."""
    run, _ = find_run(check_inputs(config, None).config)
    restored.write_text(str(run.checkpoint.step if run else None))
    if run:
        run.lock.close()
    if run or not checkpoint.steps(restored.parent / "runs/latest"):
        run_here(config)


def kill_and_continue(
    parent: Path, model_path: str, name: str, step: int, *operations: str
) -> None:
    """A run for each operation of the save of a step, or for those named, and one that is not
    killed.

    In a process that itself has run nothing, because it forks.
    """
    whole = config_in(parent / "whole", model_path, *STEPS, schema=SCHEMAS[name])
    assert in_a_fork(run_here, whole) == 0
    code, number = -signal.SIGKILL, 0
    while code == -signal.SIGKILL and number < (len(operations) or 1000):
        operation, number = operations[number] if operations else number + 1, number + 1
        (folder := parent / str(number)).mkdir()
        config = whole.updated({"trainer.default_local_dir": f"{folder}/runs"})
        code = in_a_fork(train_and_die, config, step, operation, folder / "killed_at")
        assert code in (-signal.SIGKILL, 0)
        assert in_a_fork(look_and_continue, config, folder / "restored") == 0


def killed_at_each(parent: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """`kill_and_continue`; where each run was killed and which step was restored. All have the same
    numbers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, __file__, str(parent), *arguments],
        check=True,
        env=environment,
        timeout=1700,
    )
    expected = parent / "whole/runs/latest/global_step_3"
    operations, restored = [], []
    for number in range(1, len(list(parent.iterdir()))):
        folder = parent / str(number)
        operations.append((folder / "killed_at").read_text())
        restored.append((folder / "restored").read_text())
        assert numbers_of(folder) == numbers_of(parent / "whole"), operations
        files = {file.relative_to(expected) for file in expected.rglob("*.safetensors")}
        last = folder / "runs/latest/global_step_3"
        assert {file.relative_to(last) for file in last.rglob("*.safetensors")} == files, operations
        assert all(
            (last / file).read_bytes() == (expected / file).read_bytes() for file in files
        ), operations
        assert checkpoint.read(last).step == 3
    return operations, restored


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_at_any_operation_of_a_save_is_continued_bit_for_bit(
    tmp_path: Path, model_path: str
):
    operations, restored = killed_at_each(tmp_path, model_path, "sft", "2")
    # It is the second step's checkpoint that counts as soon as its folder has its name. Threads
    # differ in who is first, so that an operation may be that of two kills, or of none.
    named = restored.count("1")
    assert restored == ["1"] * named + ["2"] * (len(restored) - named)
    assert "os.rename global_step_2.partial" not in operations[named:], operations
    assert "os.rename global_step_1" not in operations[:named], operations
    assert named > 20 and len(restored) - named > 5, list(zip(operations, restored, strict=True))
    for run_dir in tmp_path.glob("[0-9]*/runs/2*"):
        assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_3"]


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_at_any_operation_of_its_last_save_is_continued_or_complete(
    tmp_path: Path, model_path: str
):
    operations, restored = killed_at_each(tmp_path, model_path, "sft", "3")
    named, complete = restored.count("2"), restored.count("2") + restored.count("3")
    assert restored == ["2"] * named + ["3"] * (complete - named) + ["None"] * (
        len(restored) - complete
    )
    assert "os.rename global_step_3.partial" not in operations[named:], operations
    assert "os.rename global_step_2" not in operations[:named], operations
    # Then the row of the step is written, after which the manifest is without it: the run is
    # complete.
    assert "os.rename manifest.json.partial" not in operations[complete:], operations
    assert complete - named > 2 and len(restored) > complete, operations
    assert "os.mkdir huggingface" in operations[:named], operations
    assert all(len(list(folder.glob("2*"))) == 1 for folder in tmp_path.glob("*/runs"))


@pytest.mark.proof
def test_a_run_that_is_killed_before_its_first_checkpoint_has_its_name_is_begun_anew(
    tmp_path: Path, model_path: str
):
    _, restored = killed_at_each(
        tmp_path, model_path, "sft", "1", "os.rename global_step_1.partial"
    )
    dead, new = sorted((tmp_path / "1/runs").glob("2*"))
    assert restored == ["None"] and (tmp_path / "1/runs/latest").resolve() == new
    assert not list(dead.glob("global_step_*")), "what the killed run was saving is removed"


@pytest.mark.proof
@pytest.mark.parametrize("name", ["rm", "dpo"])
def test_a_run_that_is_killed_as_a_checkpoint_gets_its_name_is_continued_bit_for_bit(
    name: str, tmp_path: Path, model_path: str
):
    points = ["os.rename global_step_2.partial", "os.rename global_step_1"]
    operations, restored = killed_at_each(tmp_path, model_path, name, "2", *points)
    assert (operations, restored) == (points, ["1", "2"])


if __name__ == "__main__":
    parent, model, name, step, *operations = sys.argv[1:]
    kill_and_continue(Path(parent), model, name, int(step), *operations)
