"""A run that ended is continued as if it had not, in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import metrics_of, tiny_run_settings
from safetensors.torch import load_file
from test_local_step import local_trainer, run_locally

from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.experience_maker import Experience
from verl_like.trainer.learner import Update

PPO = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "trainer.critic_warmup=1"]
PPO += ["actor_rollout_ref.actor.optim.lr_scheduler_type=linear", "trainer.test_freq=2", "trainer.save_freq=1"]
APART = ["+resource_pool_spec.rollout_pool=[1]", "role_mapping.rollout=rollout_pool"]
GRPO = ["algorithm.adv_estimator=grpo", "trainer.save_freq=1"]
FILTERED = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step without its times."""
    times = ("timing_s/", "perf/", "reward/early_ratio")
    return [
        {name: value for name, value in row.items() if not name.startswith(times) and "/perf/" not in name}
        for row in metrics_of(folder)
    ]


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Of every file of the step's checkpoint: weights, optimizers and the models that are exported."""
    checkpoint = folder / f"runs/latest/global_step_{step}"
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.relative_to(checkpoint)} {name}": t for file in files for name, t in load_file(file).items()}


def run_until(last_step: int, folder: Path, tiny_llama: Callable, *settings: str, steps: int = 5) -> None:
    """A run that is interrupted in the middle of the step after `last_step`."""
    with local_trainer(folder, tiny_llama, *settings, steps=steps) as trainer:
        learn = trainer.learner.learn

        def learn_or_end(experience: Experience) -> Update:
            if trainer.global_step > last_step:
                raise KeyboardInterrupt
            return learn(experience)

        trainer.learner.learn = learn_or_end
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()


def config_of(folder: Path, tiny_llama: Callable, *settings: str, steps: int = 5) -> PPOConfig:
    length = ["trainer.n_gpus_per_node=1", f"trainer.total_training_steps={steps}"]
    return load_ppo_config([*tiny_run_settings(folder, tiny_llama), *length, *settings])


@pytest.mark.parametrize(
    "settings",
    [
        [*PPO, *FILTERED],
        [*GRPO, *FILTERED, "trainer.pipeline_depth=1", *APART, "algorithm.rollout_correction.bypass_mode=true"],
    ],
    ids=["dynamic sampling", "dynamic sampling a step ahead"],
)
def test_a_run_that_is_interrupted_twice_equals_one_that_is_not(
    settings: list[str], tmp_path: Path, tiny_llama: Callable
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_locally(whole, tiny_llama, *settings, steps=5)
    run_until(1, parts, tiny_llama, *settings)
    run_until(3, parts, tiny_llama, *settings)
    run_locally(parts, tiny_llama, *settings, steps=5)
    assert len(list((parts / "runs").glob("2*"))) == 1
    assert numbers_of(parts) == numbers_of(whole)
    assert [row["step"] for row in metrics_of(parts)] == [0, 1, 2, 3, 4, 5]
    assert any(row.get("rollout/num_prompt_batches", 1) > 1 for row in metrics_of(parts))
    expected = tensors_of(whole, 5)
    tensors = tensors_of(parts, 5)
    assert tensors.keys() == expected.keys() and any(name.endswith(".exp_avg_sq") for name in tensors)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
