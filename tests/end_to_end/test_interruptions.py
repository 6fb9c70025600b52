"""A run that is interrupted, or loses a worker, ends at once, says why, leaves valid files and no process behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import SPLIT, metrics_of, tiny_run_settings

pytestmark = pytest.mark.ray
DEADLINE_S = 200.0


def heed_interrupts() -> None:
    """A shell starts background jobs with interrupts ignored, which their children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path, tiny_llama: Callable) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts a run that would go on for hours; what is left of it is killed after the test."""
    started: list[psutil.Process] = []

    def run() -> subprocess.Popen:
        settings = [*tiny_run_settings(tmp_path, tiny_llama), *SPLIT, "trainer.total_training_steps=10000"]
        settings += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
        with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl_like.trainer.main_ppo", *settings],
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that a signal of the test runner's terminal does not reach it
                preexec_fn=heed_interrupts,
            )
        started.append(psutil.Process(process.pid))
        return process

    yield run
    for process in started:
        if process.is_running():
            for member in [*process.children(recursive=True), process]:
                member.kill()


def wait_for_steps(folder: Path, process: subprocess.Popen, num_rows: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "runs/latest/metrics.jsonl").exists() or len(metrics_of(folder)) < num_rows:
        assert process.poll() is None, (folder / "err").read_text()
        assert time.monotonic() < deadline, (folder / "out").read_text()
        time.sleep(0.2)


def assert_nothing_is_left(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, f"still running: {[(p.pid, p.name()) for p in alive]}"


def test_an_interrupted_run_stops_cleanly_and_its_files_are_valid(tmp_path: Path, start: Callable):
    process = start()
    wait_for_steps(tmp_path, process, num_rows=2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert_nothing_is_left(family)
    run = tmp_path / "runs/latest"
    assert all(row["step"] > 0 for row in metrics_of(tmp_path))
    assert [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    assert "Interrupted" in (run / "report.html").read_text()
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_a_killed_worker_ends_the_run_with_its_role_rank_and_method(tmp_path: Path, start: Callable):
    process = start()
    wait_for_steps(tmp_path, process, num_rows=1)
    family = psutil.Process(process.pid).children(recursive=True)
    placement = next(line for line in (tmp_path / "out").read_text().splitlines() if "critic_pool" in line)
    _, _, _, processes, _ = (cell.strip() for cell in placement.strip("│ ").split("│"))
    victim = int(processes.split(", ")[1])
    os.kill(victim, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    message = (tmp_path / "err").read_text()
    assert re.search(rf"critic rank 1 \(node [\d.]+, pid {victim}\) died during \w+", message)
    assert_nothing_is_left(family)
    assert "died" in (tmp_path / "runs/latest/report.html").read_text()
