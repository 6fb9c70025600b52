"""50 GRPO steps of a task that is learned in them, by verl_like's trainer and by TRL's with the
same hyper-parameters: the reward curves are the same within noise.

The task: a prompt is one of 32 words, four times; the reward is the share of the 8 tokens of the
response that are that word. Every step trains on all prompts, 8 samples each, in one AdamW update,
from the same random Llama of two layers. Two seeds a side, which draw the samples. Within noise
means, as declared before the first run: the sides' mean rewards over the last ten steps, and over
all of them, differ by at most 0.1 or, if that is more, the spread between the seeds.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.grpo_step import THREADS
from benchmarks.harness import Report, Side, sized
from benchmarks.sides import grpo_world as world

STEPS, TEN = sized((50, 10), (2, 1))
SEEDS = sized((1, 2), (1,))
VOCABULARY = 33  # with the end token
LEARNING_RATE = 1e-3


def main() -> None:
    report = Report(
        "grpo_reward_curve", f"{STEPS} GRPO steps of a copy task: verl_like's rewards and TRL's"
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden": 128, "layers": 2, "intermediate": 256, "positions": 64}
        world.make_model(Path(folder, "model"), vocab_size=VOCABULARY, **shape)
        prompts = world.copy_prompts(VOCABULARY)
        world.write_prompts(Path(folder, "prompts.parquet"), prompts)
        rewards = {name: np.zeros((len(SEEDS), STEPS)) for name in ("ours", "trl")}
        for row, seed in enumerate(SEEDS):
            for name, values in run(folder, prompts, seed).items():
                rewards[name][row] = values
    for start in range(0, STEPS, TEN):
        for name, values in rewards.items():
            means = values[:, start : start + TEN].mean(1)
            report.row(f"steps {start + 1} to {start + TEN}, {name}", "mean reward", means.tolist())
    for what, steps in (
        ("the last ten steps", slice(STEPS - TEN, STEPS)),
        ("all steps", slice(0, STEPS)),
    ):
        means = {name: values[:, steps].mean(1) for name, values in rewards.items()}
        difference = abs(means["ours"].mean() - means["trl"].mean())
        noise = max(0.1, *(float(np.ptp(values)) for values in means.values()))
        report.target(f"difference of the mean rewards of {what}", difference, "<=", noise)
    last = {name: values[:, -TEN:].mean() for name, values in rewards.items()}
    learned = min(values - rewards[name][:, 0].mean() for name, values in last.items())
    report.target(
        "gain of the mean reward from the first to the last steps, smaller of both",
        learned,
        ">=",
        0.3,
    )
    report.write()


def run(folder: str, prompts: list[str], seed: int) -> dict[str, list[float]]:
    """The mean reward of each step of both sides."""
    ours = Side("ours", "grpo_ours.py", "project")
    trl = Side("trl", "grpo_trl.py", "peers")
    ours.call("start", overrides=overrides(folder, len(prompts), seed))
    trl.call(
        "start",
        processes=THREADS,
        model=f"{folder}/model",
        prompts=prompts,
        reward="copies",
        response_length=world.COPY_LENGTH,
        lr=LEARNING_RATE,
        steps=STEPS,
        seed=seed,
        batch=len(prompts) * world.SAMPLES_PER_PROMPT,
        forced=False,
    )
    rewards = {
        side.name: [side.call("step")["reward"] for _ in range(STEPS)] for side in (ours, trl)
    }
    for side in (ours, trl):
        side.close()
    return rewards


def overrides(folder: str, num_prompts: int, seed: int) -> list[str]:
    """The run's configuration."""
    return [
        "device=cpu",
        f"trainer.n_gpus_per_node={THREADS}",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.train_batch_size={num_prompts}",
        "data.max_prompt_length=4",
        f"data.max_response_length={world.COPY_LENGTH}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
        f"actor_rollout_ref.rollout.n={world.SAMPLES_PER_PROMPT}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "algorithm.adv_estimator=grpo",
        "custom_reward_function.path=pkg://benchmarks.sides.grpo_world",
        "custom_reward_function.name=copies",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder}/run",
    ]


if __name__ == "__main__":
    main()
