"""Algorithms that need more of the maker than a batch of scored samples, each in a run in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import metrics_of
from test_local_step import run_locally

from verl_like.trainer.experience_maker import Experience, ExperienceMaker

SETTINGS = [
    "critic.enable=false",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "data.max_response_length=6",
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """The experience of every step."""
    experience: list[Experience] = []
    make = ExperienceMaker.make

    def make_and_keep(self: ExperienceMaker, *arguments: object, **named: object) -> Experience:
        experience.append(make(self, *arguments, **named))
        return experience[-1]

    monkeypatch.setattr(ExperienceMaker, "make", make_and_keep)
    return experience


def test_dynamic_sampling_trains_on_full_batches_of_prompts_whose_responses_differ(
    tmp_path: Path, tiny_llama: Callable, made: list[Experience]
):
    settings = [*SETTINGS, "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"]
    settings += ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4"]
    run_locally(tmp_path, tiny_llama, *settings, "reward.overlong_buffer.penalty_factor=0.5", steps=2)
    for step, experience in zip(metrics_of(tmp_path), made, strict=True):
        batch = experience.batch
        scores = batch.batch["rule_scores"].sum(-1).view(4, 2)
        assert len(set(batch.non_tensor_batch["uid"])) == 4 and (scores[:, 0] != scores[:, 1]).all()
        assert step["rollout/num_filler_groups"] == 0 and step["rollout/num_prompt_batches"] >= 1
        kept = 4 * step["rollout/num_prompt_batches"] - step["rollout/num_equal_groups"]
        assert kept - step["rollout/num_surplus_groups"] == 4
        # The buffer begins after 6 - 4 tokens: a penalty of 0.5 / 4 for each token more.
        lengths = batch.batch["response_mask"].sum(-1)
        penalty = -0.125 * (lengths - 2).clamp(min=0)
        torch.testing.assert_close(batch.batch["token_level_scores"].sum(-1), scores.flatten() + penalty)
        assert step["reward/overlong_penalty"] == pytest.approx(float(penalty.mean()))
    # Steps take prompts one after the other: those of the second follow the last of the first.
    assert sum(step["rollout/num_prompt_batches"] for step in metrics_of(tmp_path)) > 2
    uids = [uid for experience in made for uid in experience.batch.non_tensor_batch["uid"][::2]]
    assert len(set(uids)) == 8


def test_remax_subtracts_the_reward_of_a_greedy_response(tmp_path: Path, tiny_llama: Callable, made: list[Experience]):
    settings = [*SETTINGS, "algorithm.adv_estimator=remax", "actor_rollout_ref.actor.optim.lr=0.0"]
    run_locally(tmp_path, tiny_llama, *settings, steps=2)
    columns = made[-1].batch.batch
    baselines = columns["reward_baselines"].view(4, 2)
    assert torch.equal(baselines[:, 0], baselines[:, 1]) and (baselines > 0).all()
    expected = columns["token_level_rewards"].sum(-1, keepdim=True) - columns["reward_baselines"].unsqueeze(-1)
    torch.testing.assert_close(columns["advantages"], expected * columns["response_mask"])
