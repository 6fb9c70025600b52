"""A run that is interrupted, or loses a worker, ends at once, says why, leaves valid files and no
process behind."""

import contextlib
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
from runs import SPLIT, kill_driver, metrics_of, tiny_run_settings
from safetensors.torch import load_file

pytestmark = pytest.mark.ray
DEADLINE_S = 200.0


def heed_interrupts() -> None:
    """A shell starts background jobs with interrupts ignored, which their children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path, tiny_llama: Callable) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a run that would go on for hours; what is left of it is killed after the test."""
    started: list[psutil.Process] = []

    def run(*overrides: str) -> subprocess.Popen:
        settings = [
            *tiny_run_settings(tmp_path, tiny_llama),
            *SPLIT,
            "trainer.total_training_steps=10000",
        ]
        settings += ["trainer.val_before_train=false", "trainer.test_freq=-1", *overrides]
        with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl_like.trainer.main_ppo", *settings],
                stdout=out,
                stderr=err,
                # So that a signal of the test runner's terminal does not reach it
                start_new_session=True,
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


def assert_nothing_is_left(processes: list[psutil.Process], within_s: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert not alive, f"still running: {[(p.pid, p.name()) for p in alive]}"


def wait_for_call(folder: Path, process: subprocess.Popen, method: str) -> psutil.Process | None:
    """A worker as soon as it runs the method, which the title of its process says; "ray.init":
    until Ray starts."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, (folder / "err").read_text()
        assert time.monotonic() < deadline, (folder / "out").read_text()
        if method == "ray.init" and "Starting Ray" in (folder / "out").read_text():
            return None
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children * 20:  # a call may be shorter than it takes to list them
            with contextlib.suppress(psutil.NoSuchProcess):
                if "".join(child.cmdline()[:1]).endswith(f" {method}"):
                    return child


def assert_interrupted(folder: Path, process: subprocess.Popen, number: signal.Signals) -> None:
    """The run ends as an interrupted one: exit code, report, valid files, and no process is
    left."""
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == 130, (folder / "err").read_text()
    assert_nothing_is_left(family)
    run = folder / "runs/latest"
    for line in (run / "timeline.jsonl").read_text().splitlines():
        json.loads(line)
    assert "Interrupted" in (run / "report.html").read_text()
    assert "Interrupted" in (folder / "out").read_text()
    assert (
        "Traceback" not in (folder / "err").read_text()
        and "SIGTERM" not in (folder / "err").read_text()
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.proof)]
)
def test_an_interrupted_run_stops_cleanly_and_its_files_are_valid(
    tmp_path: Path, start: Callable, number: int
):
    process = start()
    wait_for_steps(tmp_path, process, num_rows=2)
    assert_interrupted(tmp_path, process, number)
    assert all(row["step"] > 0 for row in metrics_of(tmp_path))


@pytest.mark.proof
@pytest.mark.parametrize(
    "method", ["ray.init", "init_model", "collect_completions", "update_actor", "save_checkpoint"]
)
def test_a_preempted_run_stops_cleanly_in_every_phase(tmp_path: Path, start: Callable, method: str):
    process = start("trainer.save_freq=1")
    wait_for_call(tmp_path, process, method)
    assert_interrupted(tmp_path, process, signal.SIGTERM)
    saved = list((tmp_path / "runs/latest").glob("global_step_*[0-9]/*/*/*.safetensors"))
    for file in saved:
        load_file(file)  # what is there is whole


@pytest.mark.proof
def test_signals_that_come_while_a_run_ends_lose_no_report(tmp_path: Path, start: Callable):
    process = start()
    wait_for_steps(tmp_path, process, num_rows=1)
    family = psutil.Process(process.pid).children(recursive=True)
    while process.poll() is None:
        process.terminate()
        time.sleep(0.2)
    # While Ray shuts down, SIGTERM has its default action again; Ray's agents then notice by
    # themselves, in a minute.
    assert process.returncode in (130, -signal.SIGTERM)
    assert_nothing_is_left(family, within_s=150)
    assert "Interrupted" in (tmp_path / "runs/latest/report.html").read_text()
    assert (
        "Interrupted" in (tmp_path / "out").read_text()
        and "Traceback" not in (tmp_path / "err").read_text()
    )


@pytest.mark.proof
def test_a_killed_worker_ends_the_run_with_its_role_rank_and_method(
    tmp_path: Path, start: Callable
):
    process = start()
    wait_for_steps(tmp_path, process, num_rows=1)
    family = psutil.Process(process.pid).children(recursive=True)
    placement = next(
        line for line in (tmp_path / "out").read_text().splitlines() if "critic_pool" in line
    )
    _, _, _, processes, _ = (cell.strip() for cell in placement.strip("│ ").split("│"))
    victim = int(processes.split(", ")[1])
    os.kill(victim, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    message = (tmp_path / "err").read_text()
    assert re.search(rf"critic rank 1 \(node [\d.]+, pid {victim}\) died during \w+", message)
    assert_nothing_is_left(family)
    assert "died" in (tmp_path / "runs/latest/report.html").read_text()


@pytest.mark.proof
def test_of_a_killed_run_with_vllm_the_next_start_finds_everything_and_the_terminal_stays_readable(
    start: Callable[..., subprocess.Popen],
    tmp_path: Path,
    ray_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TMPDIR", str(ray_folder))
    settings = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=float32"]
    killed = start(*settings)
    wait_for_steps(tmp_path, killed, num_rows=2)
    kill_driver(killed)
    assert list(ray_folder.rglob("vllm_dist_*"))
    assert (tmp_path / "err").read_text() == ""
    again = start(*settings, "trainer.resume_mode=disable", "trainer.total_training_steps=1")
    assert again.wait(timeout=DEADLINE_S) == 0, (tmp_path / "err").read_text()
    left = [path.name for path in (*ray_folder.iterdir(), *(ray_folder / "ray").iterdir())]
    assert not [name for name in left if name.startswith(("vllm", "verl_like", "session"))], left
