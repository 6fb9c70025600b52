"""From the command to the end of the first step: a run that is continued, next to one that is new.

Both are the same command, in turn. The new run is interrupted when it has a checkpoint, and
continued: it compares the hashes of all files and restores actor, critic and both optimizers.
Neither validates before its first step.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import toy_world
from benchmarks.harness import ROOT, Report, sized
from verl_like.trainer.state import checkpoint

ROUNDS = sized(3, 1)


def rows_of(folder: Path) -> list[dict[str, float]]:
    file = folder / "latest/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def seconds_to_first_step(
    folder: Path, num_rows: int, world: list[str], tree: Path = ROOT
) -> float:
    """Runs the command of a checkout until one more row is in the metrics and there is a
    checkpoint."""
    command = [
        sys.executable,
        "-m",
        "verl_like.trainer.main_ppo",
        "--config-dir",
        "examples/split_placement/config",
    ]
    command += [
        "--config-name",
        "toy",
        f"trainer.default_local_dir={folder}",
        "trainer.save_freq=1",
    ]
    command += ["trainer.val_before_train=false", "trainer.test_freq=-1", *world]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(rows_of(folder)) != num_rows + 1:
        assert process.poll() is None and time.perf_counter() - started < 300
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    while not list(folder.glob("2*/global_step_*[0-9]/manifest.json")):
        assert process.poll() is None and time.perf_counter() - started < 300
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)  # it ends its processes, and begins no checkpoint
    process.wait(timeout=120)
    return seconds


def main() -> None:
    report = Report(
        "resume", "From the command to the first step, of a run that is continued and of a new one"
    )
    world = toy_world.make()
    new = []
    continued = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent)
            new.append(seconds_to_first_step(folder, 0, world))
            (run_dir,) = folder.glob("2*")
            newest, _ = checkpoint.newest(run_dir)
            assert newest
            # The continued run would cut off later rows itself, but they must not be taken for its
            # own.
            os.truncate(run_dir / "metrics.jsonl", newest.state["files"]["metrics.jsonl"])
            continued.append(seconds_to_first_step(folder, newest.step, world))
            assert len(list(folder.glob("2*"))) == 1, "the run was not continued"
    report.row("a new run", "s", new)
    ratio = statistics.median(continued) / statistics.median(new)
    report.row("a continued run", "s", continued, times_new=ratio)
    report.target("a continued run / a new one", ratio, "<=", 1.2)
    report.write()


if __name__ == "__main__":
    main()
