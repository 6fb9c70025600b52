"""The toy job of the examples, synchronous and detached: vLLM, rewards and updates are real, on two
cores.

Both are command lines with the same data, model, seed and GRPO settings, 32 prompts with 8
responses in a step, and two processes that compute: in the synchronous run both generate and then
both train, in the detached run one generates and one trains, at staleness 1. A time is of the steps
from the third to the last but one, without the validations before and after them. There is no
target: what detached training gains is at most the time of the faster side, and on two cores two
processes that generate are as good as one that trains meanwhile.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import toy_world
from benchmarks.harness import ROOT, Report, sized

STEPS, SKIPPED, ROUNDS = sized((24, 2, 2), (3, 1, 1))
SAMPLES = 32 * 8
ACCURACY = "val-core/verl_like/arithmetic/reward/mean@1"
COMMANDS = {
    "synchronous": ["main_ppo", "--config-dir", "examples/grpo/config"],
    "detached, 1 maker + 1 trainer": ["main_detached", "--config-dir", "examples/detached/config"],
}
SETTINGS = {
    # As the detached example has it
    "synchronous": "algorithm.rollout_correction.bypass_mode=true",
    "detached, 1 maker + 1 trainer": "trainer.max_staleness=1",
}


def run(name: str, seed: int, world: list[str]) -> list[dict[str, float]]:
    """The rows of the run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"trainer.total_training_steps={STEPS}",
            f"trainer.test_freq={STEPS}",
            f"trainer.seed={seed}",
        ]
        overrides += [f"trainer.default_local_dir={folder}", SETTINGS[name], *world]
        entry_point, *config = COMMANDS[name]
        command = [
            sys.executable,
            "-m",
            f"verl_like.trainer.{entry_point}",
            *config,
            "--config-name",
            "toy",
            *overrides,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=900
        )
        return [
            json.loads(line)
            for line in (Path(folder) / "latest/metrics.jsonl").read_text().splitlines()
        ]


def trained(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Those of training steps, not of validations alone."""
    return [row for row in rows if "timing_s/step" in row]


def main() -> None:
    report = Report(
        "detached_toy", "The toy job of the examples, synchronous and detached, on the same work"
    )
    world = toy_world.make()
    rows = {name: [run(name, seed, world) for seed in range(1, ROUNDS + 1)] for name in COMMANDS}
    rates = {}
    for name, runs in rows.items():
        seconds = [[row["timing_s/step"] for row in trained(steps)] for steps in runs]
        assert all(len(each) == STEPS for each in seconds), (name, seconds)
        rates[name] = [SAMPLES * (STEPS - SKIPPED - 1) / sum(each[SKIPPED:-1]) for each in seconds]
        times = statistics.median(rates[name]) / statistics.median(rates["synchronous"])
        report.row(name, "samples/s", rates[name], times_synchronous=times)
        accuracies = [
            next(row[ACCURACY] for row in reversed(steps) if ACCURACY in row) for steps in runs
        ]
        report.row(f"{name}, held-out accuracy at the end", "of 1", accuracies)
    for side in ("maker_0", "trainer_0"):
        of_runs = [
            steps[SKIPPED:-1] for steps in map(trained, rows["detached, 1 maker + 1 trainer"])
        ]
        idle = [row[f"detached/idle/{side}"] for steps in of_runs for row in steps]
        report.row(f"idle share of {side}", "of 1", idle)
    report.write()


if __name__ == "__main__":
    main()
