"""The run shell knows no trainer: one of a few lines runs through it as PPO does."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import toy_trainer
from runs import kill_driver
from test_interruptions import assert_nothing_is_left, heed_interrupts

from verl_like.rewards.manager import RewardError
from verl_like.trainer.run import shell as run
from verl_like.trainer.run import tracking
from verl_like.trainer.run.errors import InputRefused, RunFailed
from verl_like.trainer.run.run_recorder import RunRecorder

TOY = Path(__file__).with_name("toy_trainer.py")
DEADLINE_S = 120.0


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOY), f"trainer.default_local_dir={folder}/runs", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=heed_interrupts)


def run_here(folder: Path, *overrides: str) -> int:
    """The exit code of the command, which runs in this process."""
    with run.signals_as_before():
        try:
            return toy_trainer.main([f"trainer.default_local_dir={folder}/runs", *overrides])
        except SystemExit as ended:
            return ended.code


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, whose metrics docs/metrics.md does not describe."""
    return [
        json.loads(line) for line in (folder / "runs/latest/metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.ray
@pytest.mark.usefixtures("drawn_charts")
def test_a_trainer_of_a_few_lines_trains_and_leaves_metrics_and_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    code = run_here(tmp_path, "target=0.5", "trainer.steps=4")
    out, err = capfd.readouterr()
    assert code == 0, err
    # The rate follows the target: half of the way each step.
    rows = metrics_of(tmp_path)
    assert [row["toy/distance"] for row in rows] == [0.25, 0.125, 0.0625, 0.03125]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and not any(
        "perf/overlap" in row for row in rows
    )
    run_dir = tmp_path / "runs/latest"
    report = (run_dir / "report.html").read_text()
    assert (
        report.count("<svg") == 1
        and "Done: 4 training steps." in report
        and "verl_like / descent" in report
    )
    assert "rate: 0.5" in (run_dir / "config.yaml").read_text()
    assert "from 0" in out and "step 4/4  distance 0.031" in out and "cleaned up" in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target=0.5", "rate=2.0"], "rate=2.0: expected a number between 0 and 1"),
        (["target=0.5", "rat=0.25"], "rat: there is no such key; did you mean rate?"),
        ([], "target: this key has no default, set it"),
        (["target=0.0", "rate=0.5"], "target=0 is where the number is"),
        (
            ["target=0.5", "ray_kwargs.ray_init.address=127.0.0.1:1"],
            "no Ray cluster can be joined at 127.0.0.1:1",
        ),
    ],
)
def test_what_is_wrong_with_its_input_is_refused_with_exit_code_2(
    tmp_path: Path, overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
):
    assert run_here(tmp_path, *overrides) == 2
    err = capfd.readouterr().err
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
def test_it_is_interrupted_with_130_and_leaves_a_report_and_no_process(tmp_path: Path):
    process = start(tmp_path, "target=0.5", "trainer.steps=1000000")
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "runs/latest/metrics.jsonl").exists() or not metrics_of(tmp_path):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert_nothing_is_left(family)
    assert (
        "Interrupted" in out and "Interrupted" in (tmp_path / "runs/latest/report.html").read_text()
    )


@pytest.mark.proof
@pytest.mark.ray
def test_a_killed_run_leaves_a_folder_until_the_next_starts_and_one_that_ends_well_leaves_none(
    tmp_path: Path, ray_folder: Path
):
    killed = start(tmp_path, "target=0.5", "trainer.steps=1000000")
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "runs/latest/metrics.jsonl").exists() or not metrics_of(tmp_path):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    kill_driver(killed)
    killed.communicate(timeout=DEADLINE_S)
    (left,) = ray_folder.glob("ray/session_2*")
    (ray_folder / "ray/session_of_another").mkdir()
    process = start(tmp_path, "target=0.5", "trainer.steps=4")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert not left.exists()
    assert [path.name for path in ray_folder.glob("ray/session_*")] == ["session_of_another"]


def test_a_folder_that_cannot_be_written_is_refused_with_exit_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    assert run_here(tmp_path / "file", "target=0.5") == 2
    err = capfd.readouterr().err
    assert "file/runs cannot be written" in err and "Traceback" not in err


def test_a_full_disk_ends_a_run_with_where_its_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    config = toy_trainer.ToyConfig(
        trainer={"default_local_dir": str(tmp_path)}, target=0.5, rate=0.5
    )
    recorder = RunRecorder(config, toy_trainer.DISPLAY)
    (recorder.run_dir / "report.html").mkdir()  # so that it cannot be written either
    monkeypatch.setattr(run, "start_ray", lambda *_: None)

    def fit(inputs: toy_trainer.ToyInputs, recorder: RunRecorder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run.train(toy_trainer.ToyInputs(config), fit, recorder) == 1
    out, err = capfd.readouterr()
    assert (
        "No space left on device. Earlier checkpoints are as they were." in err
        and str(recorder.run_dir) in err
    )
    assert "The report is not written" in out


@pytest.mark.parametrize("fault", ["hangs", "raises"])
def test_a_run_whose_tracker_fails_trains_to_its_end_and_says_what_the_tracker_lacks(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    never = threading.Event()

    def log(metrics: dict[str, float], step: int) -> None:
        if fault == "raises":
            raise ConnectionError("no network")
        never.wait(600)

    monkeypatch.setitem(tracking.TRACKERS, "mlflow", lambda tracked: tracking.Tracker(log, list))
    monkeypatch.setattr(tracking, "FINISH_S", 1.5)
    monkeypatch.setattr(run, "start_ray", lambda *_: None)
    settings = {"default_local_dir": str(tmp_path), "logger": ["mlflow"], "steps": 5}
    config = toy_trainer.ToyConfig(trainer=settings, target=0.5, rate=0.5)
    recorder = RunRecorder(config, toy_trainer.DISPLAY)
    assert run.train(toy_trainer.ToyInputs(config), toy_trainer.fit, recorder) == 0
    never.set()
    rows = [
        json.loads(line) for line in (recorder.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["toy/distance"] for row in rows] == [0.25, 0.125, 0.0625, 0.03125, 0.015625]
    reason = "ConnectionError: no network" if fault == "raises" else "it did not end within 1.5 s"
    out, _ = capfd.readouterr()
    assert (
        f"Tracker mlflow lacks 5 of 5 rows of metrics ({reason})" in out
        and "Done: 5 training steps." in out
    )


def test_from_python_a_failed_run_raises_what_the_command_prints_without_secrets(tmp_path: Path):
    settings = {"default_local_dir": str(tmp_path), "steps": 2}
    config = toy_trainer.ToyConfig(
        trainer=settings, target=0.5, rate=0.5, plugins=["https://user:canary@host/"]
    )

    def fit(inputs: toy_trainer.ToyInputs, recorder: RunRecorder) -> None:
        raise RewardError("the judge at https://user:canary@host/ has no answer")

    with pytest.raises(RunFailed, match=r"^the judge at https://\*\*\*@host/ has no answer$"):
        run.run_or_raise(config, toy_trainer.check_inputs, fit, toy_trainer.DISPLAY, uses_ray=False)
    assert "Stopped: the judge at" in (tmp_path / "latest/report.html").read_text()


def test_from_python_a_run_returns_its_folder_and_wrong_input_is_a_value_error(tmp_path: Path):
    settings = {"default_local_dir": str(tmp_path), "steps": 2}
    config = toy_trainer.ToyConfig(trainer=settings, target=0.5, rate=0.5)
    parts = (toy_trainer.check_inputs, toy_trainer.fit, toy_trainer.DISPLAY)
    before = [signal.getsignal(number) for number in run.ENDING_SIGNALS]
    run_dir = run.run_or_raise(config, *parts, uses_ray=False)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["toy/distance"] for row in rows] == [0.25, 0.125]
    assert [signal.getsignal(number) for number in run.ENDING_SIGNALS] == before

    wrong = config.model_copy(update={"target": 0.0})
    with pytest.raises(InputRefused, match="target=0 is where the number is"):
        run.run_or_raise(wrong, *parts, uses_ray=False)
