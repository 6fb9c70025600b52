"""Runs another version of the project and this one on the same work, and compares tokens, numbers
and weights.

    python -m scripts.same_numbers 203e2bf
    python -m scripts.same_numbers 203e2bf --jobs sft dpo --num-seeds 1

The first runs all jobs with three seeds and writes docs/same_numbers.md; a part writes nothing.

The other version is checked out below build/same_numbers. It ends with exit code 1 if something is
further apart than its bound.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.commit import ROOT, commit
from scripts.same_numbers.compare import (
    Difference,
    compare_metrics,
    compare_steps,
    compare_tensors,
    is_gradient,
    is_weight,
)

WORK = ROOT / "build" / "same_numbers"
WORLD = WORK / ".toy_world"
PAGE = ROOT / "docs" / "same_numbers.md"
NUM_SEEDS = 3
NUM_STEPS = 30
LIMIT_S = 1800
STEP_BOUND = 1e-5
GRADIENT_BOUND = 1e-6
REORDERED: dict[str, str] = {}
"""Jobs whose weights may differ in rounding, with the sums that are added up in another order."""


@dataclass(frozen=True)
class Job:
    """A training command at toy scale. estimator: the recorded one, where experience is
    recorded."""

    name: str
    what: str
    trainer: str
    config: tuple[str, str] | None
    overrides: tuple[str, ...]
    one_optimizer_step: tuple[str, ...]
    """Overrides that make a training step one optimizer step."""
    estimator: str = ""


def on_prompts(
    name: str, what: str, config: str, estimator: str, *overrides: str, mini_batch: int
) -> Job:
    return Job(
        name,
        what,
        "detached" if name == "detached" else "ppo",
        (config, "toy"),
        (
            f"data.train_files={WORLD}/train.parquet",
            f"data.val_files={WORLD}/test.parquet",
            f"actor_rollout_ref.model.path={WORLD}/model",
            f"algorithm.adv_estimator={estimator}",
            "plugins=[same_numbers_recorder]",
            "trainer.val_before_train=false",
            *overrides,
        ),
        (f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",),
        estimator,
    )


def on_examples(name: str, what: str, config: tuple[str, str] | None, *overrides: str) -> Job:
    common = (
        f"model.path={WORLD}/model",
        "data.train_batch_size=64",
        "trainer.device=cpu",
        *overrides,
    )
    return Job(name, what, name, config, common, ())


JOBS = (
    on_prompts(
        "toy",
        "PPO with split placement, two ranks a pool, critic and reference, vLLM",
        "split_placement",
        "recorded_gae",
        mini_batch=256,
    ),
    on_prompts("grpo", "GRPO on two ranks, vLLM", "grpo", "recorded_grpo", mini_batch=32),
    on_prompts(
        "detached", "detached GRPO at staleness 0, vLLM", "detached", "recorded_grpo", mini_batch=32
    ),
    on_examples(
        "sft",
        "fine-tuning on two ranks",
        ("split_placement", "warm_up"),
        f"data.train_files={WORLD}/answers.parquet",
    ),
    on_examples(
        "dpo",
        "DPO on one rank",
        None,
        f"data.train_files={WORLD}/pairs.jsonl",
        "data.max_length=20",
        "training.optim.lr=2e-4",
    ),
)


def main() -> None:
    names = [job.name for job in JOBS]
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", help="of the other version")
    parser.add_argument("--jobs", nargs="+", choices=names, default=names)
    parser.add_argument("--num-seeds", type=int, default=NUM_SEEDS)
    arguments = parser.parse_args()
    other_tree = check_out(arguments.commit)
    make_data()
    rows = []
    is_within = True
    for job in [job for job in JOBS if job.name in arguments.jobs]:
        for seed in range(1, arguments.num_seeds + 1):
            for difference, bound in compare(job, seed, other_tree):
                is_within &= difference.relative <= bound
                verdict = "" if difference.relative <= bound else f"**above {bound:g}**"
                cells = (
                    job.name,
                    seed,
                    difference.quantity,
                    difference.num_values,
                    difference,
                    verdict,
                )
                rows.append("| " + " | ".join(map(str, cells)) + " |")
                sys.stdout.write(f"{rows[-1]}\n")
                sys.stdout.flush()
    if arguments.jobs == names and arguments.num_seeds == NUM_SEEDS:
        PAGE.write_text(page(arguments.commit, rows))
    raise SystemExit(0 if is_within else 1)


def check_out(name: str) -> Path:
    """The tree of the other version, with this one's environment."""
    tree = WORK / name
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", tree, name], cwd=ROOT, check=True)
        (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def make_data() -> None:
    """The toy world of `scripts/gpu_rehearsal_data.py`, once."""
    if not (WORLD / "pairs.jsonl").exists():
        script = ROOT / "scripts" / "gpu_rehearsal_data.py"
        subprocess.run(
            [sys.executable, script, WORK], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )


def compare(job: Job, seed: int, other_tree: Path) -> Iterator[tuple[Difference, float]]:
    """What two versions of a run differ in, each with its bound."""
    here, other = train_both(job, other_tree, "run", seed, NUM_STEPS, ())
    if job.estimator:
        for difference in compare_steps(here, other):
            yield difference, STEP_BOUND
    for difference in compare_metrics(here, other):
        yield difference, STEP_BOUND
    yield (
        compare_tensors("weights at the end", here, other, is_weight),
        STEP_BOUND if job.name in REORDERED else 0.0,
    )
    one = train_both(job, other_tree, "one_optimizer_step", seed, 1, job.one_optimizer_step)
    yield compare_tensors("gradients of the first step", *one, is_gradient), GRADIENT_BOUND


def train_both(
    job: Job, other_tree: Path, kind: str, seed: int, num_steps: int, more: tuple[str, ...]
) -> list[Path]:
    """Trains with this version and with the other one; their folders."""
    folders = []
    for side, tree in (("this", ROOT), ("other", other_tree)):
        folder = WORK / "runs" / f"{job.name}_{seed}_{kind}_{side}"
        train(
            job,
            tree,
            folder,
            (f"trainer.seed={seed}", f"trainer.total_training_steps={num_steps}", *more),
        )
        folders.append(folder)
    return folders


def train(job: Job, tree: Path, folder: Path, more: tuple[str, ...]) -> None:
    """A run with the code and the examples of a tree, in a new folder with its output and what it
    recorded."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = []
    if job.config:
        example, name = job.config
        config = ["--config-dir", f"{tree}/examples/{example}/config", "--config-name", name]
    run = ["trainer.test_freq=-1", f"trainer.default_local_dir={folder}", *job.overrides, *more]
    variables = {
        "PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).parent}",
        "OMP_NUM_THREADS": "1",
        "SAME_NUMBERS_OUT": str(folder),
    }
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", f"verl_like.trainer.main_{job.trainer}", *config, *run],
            cwd=folder,
            env=os.environ | variables,
            stdout=log,
            stderr=log,
            timeout=LIMIT_S,
        )
    if done.returncode:
        raise SystemExit(f"{folder / 'log.txt'} ends with exit code {done.returncode}")


def page(other_commit: str, rows: list[str]) -> str:
    jobs = "\n".join(f"* `{job.name}`: {job.what}" for job in JOBS)
    reordered = "\n".join(f"* `{name}`: {reason}" for name, reason in REORDERED.items()) or "None."
    table = "\n".join(
        ["| job | seed | quantity | values | difference | |", "|---|---|---|---|---|---|", *rows]
    )
    return f"""# The same numbers as another version

Written by `python -m scripts.same_numbers {other_commit}`, of commit {commit()} beside
{other_commit}. Both train on the same work for {NUM_STEPS} steps, with {NUM_SEEDS} seeds. A
difference is in units of the largest value, that of weights and gradients in units of their norm.
Weights are equal bit for bit unless a sum is named below;
gradients of the first step to {GRADIENT_BOUND:g}, all else to {STEP_BOUND:g}.

{jobs}

Sums that are added up in another order:

{reordered}

{table}
"""


if __name__ == "__main__":
    main()
