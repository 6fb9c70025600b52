"""A whole GRPO step on the CPU: verl_like's trainer (Ray, FSDP2, vLLM) against TRL's GRPOTrainer
with transformers' generate. They take turns, step by step, and each has two cores in its turn:
verl_like two training processes and two engines of one thread, which take turns too; TRL one
process of two threads, or two data-parallel ones of one thread. Both keep all activations for the
backward pass. verl_like computes the prompt of a group once in a pass, which TRL cannot.

The same random Llama of 4.5 million parameters in float32, 8 prompts of 32 tokens, 8 samples each,
one AdamW update a step on all 64 samples, no KL. Lengths are forced and the reward knows nothing of
them: all responses have 128 tokens (uniform), or lengths are the quantiles of a log-normal law with
128 as the longest and a quarter of it as the mean (long-tailed). Useful tokens are those of prompts
and responses, without padding.

Limit: (2 + 6) * parameters * tokens floating-point operations, a forward pass to generate and a
forward and backward pass to train, at the rate of a large float32 matrix product with the same
threads.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report, Side, interleave
from benchmarks.sides import grpo_world as world

THREADS = 2
LEARNING_RATE = 1e-4
Steps = dict[str, list[dict[str, Any]]]


def main() -> None:
    report = Report(
        "grpo_step", f"A whole GRPO step, {THREADS} threads in turn: verl_like against TRL"
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden": 256, "layers": 4, "intermediate": 768, "positions": 256}
        num_parameters = world.make_model(
            Path(folder, "model"), vocab_size=world.VOCABULARY, **shape
        )
        world.write_prompts(Path(folder, "prompts.parquet"), world.speed_prompts())
        rates = [matrix_product_rate()]
        found = run_steps(folder)
    rates.append(matrix_product_rate())
    report.row(
        "product of 1536 x 1536 matrices, float32", "GFLOP/s", [rate / 1e9 for rate in rates]
    )
    for index, (law, target) in enumerate((("uniform", 1.3), ("long-tailed", 2.5))):
        first = index * world.STEPS_PER_LAW + 1  # the one before warms up
        of_law = {
            name: steps[first : first + world.STEPS_PER_LAW - 1] for name, steps in found.items()
        }
        ratio = show(report, law, of_law, limit=max(rates) / (8 * num_parameters))
        report.target(f"{law}, ours / the better TRL", ratio, ">=", target)
    report.write()


def run_steps(folder: str, num_laws: int = 2, **further_ours: list[str]) -> Steps:
    """What the steps of each side returned, uniform ones first.

    `further_ours` has overrides of further sides of ours, by their names.
    """
    num_steps = num_laws * world.STEPS_PER_LAW
    sides = []
    for name, further in {"ours": [], **further_ours}.items():
        side = Side(name, "grpo_ours.py", "project")
        own_folder = f"trainer.default_local_dir={folder}/{name}"
        side.call("start", overrides=[*overrides(folder, num_steps), own_folder, *further])
        sides.append(side)
    # The rows of a pass of TRL's two processes are a quarter: that is faster than all at once.
    for processes, batch in ((1, world.NUM_SAMPLES), (THREADS, world.NUM_SAMPLES // 4)):
        name = f"trl, {processes} process{'es' if processes > 1 else ''}"
        sides.append(Side(name, "grpo_trl.py", "peers", THREADS // processes))
        sides[-1].call(
            "start",
            processes=processes,
            model=f"{folder}/model",
            prompts=world.speed_prompts(),
            reward="parity",
            response_length=world.LONGEST,
            lr=LEARNING_RATE,
            steps=num_steps,
            seed=1,
            batch=batch,
            forced=True,
        )
    found = interleave(sides, num_steps, "step", warm_up=0)
    for side in sides:
        side.close()
    for steps in zip(*found.values(), strict=True):
        assert len({(step["tokens"], step["longest"]) for step in steps}) == 1, steps
    return found


def overrides(folder: str, num_steps: int) -> list[str]:
    """The run's configuration. One thread a process: on two cores, two engines of one thread
    generate faster than one of two, since what is not a matrix product runs on both cores too."""
    return [
        "device=cpu",
        f"trainer.n_gpus_per_node={THREADS}",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.train_batch_size={world.NUM_PROMPTS}",
        f"data.max_prompt_length={world.PROMPT_LENGTH}",
        f"data.max_response_length={world.LONGEST}",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",  # as TRL's side has it
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={world.NUM_PROMPTS}",
        "actor_rollout_ref.actor.fsdp_config.strategy=ddp",  # data parallel, as TRL is
        "actor_rollout_ref.actor.use_prefix_grouper=true",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"actor_rollout_ref.rollout.n={world.SAMPLES_PER_PROMPT}",
        f"actor_rollout_ref.rollout.max_num_seqs={world.NUM_SAMPLES}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.enforce_eager=false",  # it starts later, and generates faster
        "algorithm.adv_estimator=grpo",
        "custom_reward_function.path=pkg://benchmarks.sides.grpo_world",
        "custom_reward_function.name=parity",
        f"trainer.total_training_steps={num_steps}",
        "trainer.val_before_train=false",
        "worker_classes.rollout=benchmarks.sides.grpo_lengths.ForcedLengthWorker",
    ]


def show(report: Report, law: str, found: Steps, limit: float) -> float:
    """Reports the useful tokens a second and the phases; the ratio of ours to the fastest other."""
    speed = {
        name: [step["tokens"] / step["seconds"] for step in steps] for name, steps in found.items()
    }
    median = {name: statistics.median(values) for name, values in speed.items()}
    for name, values in speed.items():
        report.row(f"{law}, {name}", "useful tokens/s", values, of_limit=median[name] / limit)
        for phase in found[name][0]["phases"]:
            report.row(
                f"{law}, {name}: {phase}", "s", [step["phases"][phase] for step in found[name]]
            )
    return median["ours"] / max(value for name, value in median.items() if name.startswith("trl"))


def matrix_product_rate() -> float:
    """Floating-point operations a second of a product of square matrices, undisturbed."""
    torch.set_num_threads(THREADS)
    size = 1536
    a = torch.randn(size, size)
    b = torch.randn(size, size)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


if __name__ == "__main__":
    main()
