"""From the start of the process to the first generation: PPO of the toy world from Python, and by
the command.

Both train with the same models, prompts, keys and processes: with one, which the command's Ray
starts and which from Python is the script's own, and with two of a Ray, which both start. The time
ends where the timeline of the run has the start of the first step's generation, after all workers
have their models.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import toy_world
from benchmarks.harness import ROOT, Report, sized

ROUNDS, WARM_UP = sized((5, 1), (1, 0))
PROCESSES = sized((1, 2), (1,))
KEYS = [
    *("algorithm.lam=0.95", "algorithm.use_kl_in_reward=true", "reward.num_workers=1"),
    *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.actor.use_dynamic_bsz=true"),
]
COMMAND = [
    *(
        "-m",
        "verl_like.trainer.main_ppo",
        "--config-dir",
        "examples/split_placement/config",
        "--config-name",
        "toy",
    ),
    *(
        "placement=colocated",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ),
    *KEYS,
]


def seconds_to_first_generation(arguments: list[str], folder: Path) -> float:
    """Of one run, in a process of its own."""
    started = time.time()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        timeout=600,
    )
    events = [
        json.loads(line) for line in (folder / "latest/timeline.jsonl").read_text().splitlines()
    ]
    return (
        min(event["started"] for event in events if event["method"] == "generate_sequences")
        - started
    )


def main() -> None:
    world = toy_world.make()
    report = Report(
        "python_way", "The start of PPO of the toy world, from Python and by the command"
    )
    for processes in PROCESSES:
        seconds: dict[str, list[float]] = {"command": [], "Python": []}
        for index in range(WARM_UP + ROUNDS):
            for name in list(seconds) if index % 2 else reversed(list(seconds)):
                with tempfile.TemporaryDirectory() as path:
                    strategy = [
                        f"{part}.fsdp_config.strategy=ddp"
                        for part in ("actor_rollout_ref.actor", "critic.model")
                    ]
                    own = [
                        f"trainer.n_gpus_per_node={processes}",
                        f"trainer.default_local_dir={path}",
                        *strategy,
                        *world,
                    ]
                    script = ["benchmarks/sides/python_way_script.py", path, str(processes)]
                    took = seconds_to_first_generation(
                        script if name == "Python" else [*COMMAND, *own], Path(path)
                    )
                if index >= WARM_UP:
                    seconds[name].append(took)
        for name, values in seconds.items():
            report.row(f"{processes} process(es): {name}", "s", values)
        ratio = median(seconds["Python"]) / median(seconds["command"])
        report.target(f"{processes} process(es): Python / command", ratio, "<=", 1.1)
    report.write()


if __name__ == "__main__":
    main()
