"""A whole GRPO step of agents on the CPU: verl_like's trainer with `agent.environment` against
TRL's GRPOTrainer with `environment_factory` and transformers' generate, with the same class, the
calculator of `examples/agents`. They take turns, step by step, and each has two cores in its turn:
verl_like two training processes, two engines and two ranks of agents of one thread, which take
turns too; TRL one process of two threads, or two data-parallel ones of one thread.

The same Llama of 3.5 million parameters in float32, 8 prompts, 8 episodes each, one AdamW update a
step on all 64 episodes, no KL. The model thinks for 24 tokens on average in each of three turns, by
a geometric law, and then calls the calculator; the calls of the last turn are not made. Both sample
from that law, so their tokens differ by chance, but not in their mean. No episode has a reward, so
the weights and the law stay, while all that belongs to a step is computed. Useful tokens are those
of prompts and responses, with what the tool returned and without padding.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import IS_SMALL, Report, Side, interleave, sized
from benchmarks.sides import agents_step_world as world
from benchmarks.sides.grpo_world import SAMPLES_PER_PROMPT

THREADS = 2
LEARNING_RATE = 1e-4
NUM_STEPS = sized(7, 2)
"""With one that warms up."""
TOKENS_APART = 0.15
"""How far the mean numbers of tokens may be from each other, by chance: 30% is their spread in an
episode, of which there are some hundred."""


def main() -> None:
    report = Report("agents_step", f"A GRPO step of agents, {THREADS} threads in turn, beside TRL")
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = world.write_model(Path(folder, "model"))
        world.write_prompts(Path(folder, "prompts.parquet"))
        found = run_steps(folder)
    check_work(found)
    speeds = {}
    for name, steps in found.items():
        values = [step["tokens"] / step["seconds"] for step in steps]
        speeds[name] = statistics.median(values)
        report.row(name, "useful tokens/s", values)
        report.row(f"{name}: tokens", "a step", [step["tokens"] for step in steps])
        for phase in steps[0]["phases"]:
            report.row(f"{name}: {phase}", "s", [step["phases"][phase] for step in steps])
    best = max(value for name, value in speeds.items() if name != "ours")
    report.target("ours / the better TRL", speeds["ours"] / best, ">=", 1.5)
    report.note(f"A model of {num_parameters / 1e6:.1f} million parameters, float32.")
    report.write()


def run_steps(folder: str) -> dict[str, list[dict[str, Any]]]:
    """What the steps of each side returned."""
    ours = Side("ours", "grpo_ours.py", "project")
    ours.call("start", overrides=overrides(folder))
    sides = [ours]
    for processes, batch in ((1, world.NUM_SAMPLES), (THREADS, world.NUM_SAMPLES // 4)):
        name = f"trl, {processes} process{'es' if processes > 1 else ''}"
        sides.append(Side(name, "agents_trl.py", "peers", THREADS // processes))
        sides[-1].call(
            "start",
            processes=processes,
            folder=folder,
            lr=LEARNING_RATE,
            steps=NUM_STEPS,
            batch=batch,
        )
    found = interleave(sides, NUM_STEPS, "step", warm_up=0)
    for side in sides:
        side.close()
    return {name: steps[1:] for name, steps in found.items()}


def check_work(found: dict[str, list[dict[str, Any]]]) -> None:
    """All call the tool in each turn but the last, and draw as much."""
    means = []
    for name, steps in found.items():
        means.append(statistics.mean(step["tokens"] for step in steps))
        assert all(step["reward"] == 0 for step in steps), (name, steps)
        for step in steps:
            assert abs(step["tool_calls"] - (world.NUM_TURNS - 1)) < 0.05, (name, step)
    assert IS_SMALL or max(means) / min(means) < 1 + TOKENS_APART, means


def overrides(folder: str) -> list[str]:
    """The run's configuration."""
    return [
        "device=cpu",
        f"trainer.n_gpus_per_node={THREADS}",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.train_batch_size={world.NUM_PROMPTS}",
        f"data.max_prompt_length={world.PROMPT_LENGTH}",
        f"data.max_response_length={world.RESPONSE_LENGTH}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={world.NUM_PROMPTS}",
        "actor_rollout_ref.actor.fsdp_config.strategy=ddp",  # data parallel, as TRL is
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        f"actor_rollout_ref.rollout.max_num_seqs={world.NUM_SAMPLES}",
        f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={world.NUM_TURNS}",
        "agent.environment=examples.agents.calculator:Calculator",
        "algorithm.adv_estimator=grpo",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder}/run",
    ]


if __name__ == "__main__":
    main()
