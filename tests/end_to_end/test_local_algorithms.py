"""Algorithms that need more of the maker than a batch of scored samples, each in a run in this
process."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import metrics_of
from test_local_step import run_locally
from transformers import AutoModelForCausalLM

from verl_like.protocol.padded import padded
from verl_like.trainer.ppo.experience_maker import Experience, ExperienceMaker, Generated

SETTINGS = [
    "critic.enable=false",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "data.max_response_length=6",
]

REWARD = """
def compute_score(solution_str, **arguments):
    return {"score": sum(map(ord, solution_str)) % 5, "acc": len(solution_str) + sum(map(ord, solution_str)) % 3}
"""


@pytest.fixture
def differing_rewards(tmp_path: Path) -> str:
    """A setting with which responses to one prompt hardly ever have the same rewards."""
    (tmp_path / "differing.py").write_text(REWARD)
    return f"custom_reward_function.path={tmp_path}/differing.py"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """The experience of every step."""
    experience: list[Experience] = []
    complete = ExperienceMaker.complete

    def complete_and_keep(self: ExperienceMaker, generated: Generated) -> Experience:
        experience.append(complete(self, generated))
        return experience[-1]

    monkeypatch.setattr(ExperienceMaker, "complete", complete_and_keep)
    return experience


def test_dynamic_sampling_trains_on_full_batches_of_prompts_whose_responses_differ(
    tmp_path: Path, tiny_llama: Callable, made: list[Experience]
):
    settings = [*SETTINGS, "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"]
    settings += ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4"]
    run_locally(
        tmp_path, tiny_llama, *settings, "reward.overlong_buffer.penalty_factor=0.5", steps=2
    )
    for step, experience in zip(metrics_of(tmp_path), made, strict=True):
        batch = padded(experience.batch)
        scores = batch.batch["rule_scores"].sum(-1).view(4, 2)
        assert len(set(batch.non_tensor_batch["uid"])) == 4 and (scores[:, 0] != scores[:, 1]).all()
        assert step["rollout/num_filler_groups"] == 0 and step["rollout/num_prompt_batches"] >= 1
        kept = 4 * step["rollout/num_prompt_batches"] - step["rollout/num_equal_groups"]
        assert kept - step["rollout/num_surplus_groups"] == 4
        # The buffer begins after 6 - 4 tokens: a penalty of 0.5 / 4 for each token more.
        lengths = batch.batch["response_mask"].sum(-1)
        penalty = -0.125 * (lengths - 2).clamp(min=0)
        torch.testing.assert_close(
            batch.batch["token_level_scores"].sum(-1), scores.flatten() + penalty
        )
        assert step["reward/overlong_penalty"] == pytest.approx(float(penalty.mean()))
    # Steps take prompts one after the other: those of the second follow the last of the first.
    assert sum(step["rollout/num_prompt_batches"] for step in metrics_of(tmp_path)) > 2
    uids = [uid for experience in made for uid in experience.batch.non_tensor_batch["uid"][::2]]
    assert len(set(uids)) == 8


def test_remax_subtracts_the_reward_of_a_greedy_response(
    tmp_path: Path, tiny_llama: Callable, made: list[Experience]
):
    settings = [*SETTINGS, "algorithm.adv_estimator=remax", "actor_rollout_ref.actor.optim.lr=0.0"]
    run_locally(tmp_path, tiny_llama, *settings, steps=2)
    columns = padded(made[-1].batch).batch
    baselines = columns["reward_baselines"].view(4, 2)
    assert torch.equal(baselines[:, 0], baselines[:, 1]) and (baselines > 0).all()
    expected = columns["token_level_rewards"].sum(-1, keepdim=True) - columns[
        "reward_baselines"
    ].unsqueeze(-1)
    torch.testing.assert_close(columns["advantages"], expected * columns["response_mask"])


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_weighs_returns_by_the_squared_probabilities_of_the_vocabulary(
    tmp_path: Path,
    tiny_llama: Callable,
    made: list[Experience],
    differing_rewards: str,
    estimator: str,
):
    settings = [
        differing_rewards,
        f"algorithm.adv_estimator={estimator}",
        "actor_rollout_ref.rollout.temperature=0.7",
    ]
    run_locally(tmp_path, tiny_llama, *SETTINGS, *settings, steps=1)
    columns = padded(made[-1].batch).batch
    model, _ = tiny_llama()
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(**inputs).logits[
            :, -7:-1
        ]
    mask = columns["response_mask"].numpy()
    squares = (logits / 0.7).softmax(-1).square().sum(-1).numpy()
    np.testing.assert_allclose(columns["sum_pi_squared"].numpy(), squares * mask, atol=1e-4)
    returns = columns["token_level_rewards"].double().numpy().sum(-1, keepdims=True) * mask
    weights = (1 - 2 * columns["old_log_probs"].double().exp().numpy() + squares) * mask
    weights = np.cumsum(weights, axis=1) * mask
    # Tokens of the two responses to a prompt are compared where both have one.
    pairs, both = weights.reshape(4, 2, -1), mask.reshape(4, 2, -1).all(1, keepdims=True)
    baselines = (pairs * returns.reshape(pairs.shape)).sum(1, keepdims=True) / np.where(
        both, pairs.sum(1, keepdims=True), 1
    )
    expected = (returns.reshape(pairs.shape) - np.where(both, baselines, 0)).reshape(
        mask.shape
    ) * mask
    np.testing.assert_allclose(columns["advantages"].numpy(), expected, atol=1e-4)
    assert np.ptp(expected) > 0.1 and metrics_of(tmp_path)[0]["actor/grad_norm"] > 0


def test_gdpo_adds_up_the_rewards_that_the_function_returns(
    tmp_path: Path, tiny_llama: Callable, made: list[Experience], differing_rewards: str
):
    keys = [
        differing_rewards,
        "algorithm.gdpo_reward_keys=[rule_scores,acc]",
        "algorithm.gdpo_reward_weights=[1.0,0.5]",
    ]
    run_locally(tmp_path, tiny_llama, *SETTINGS, "algorithm.adv_estimator=gdpo", *keys, steps=1)
    batch = padded(made[-1].batch)
    mask = batch.batch["response_mask"].numpy()
    summed = np.zeros((4, 2))
    for reward, weight in (
        (batch.batch["rule_scores"].sum(-1), 1.0),
        (batch.non_tensor_batch["reward_extra/acc"], 0.5),
    ):
        scores = np.asarray(reward, dtype=np.float64).reshape(4, 2)
        deviations = scores - scores.mean(1, keepdims=True)
        summed += weight * deviations / (scores.std(1, ddof=1, keepdims=True) + 1e-6)
    tokens = np.broadcast_to(summed.reshape(8, 1), mask.shape)
    selected = tokens[mask == 1]
    expected = (tokens - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8) * mask
    np.testing.assert_allclose(batch.batch["advantages"].numpy(), expected, atol=1e-5)
    assert np.ptp(expected) > 0.1 and metrics_of(tmp_path)[0]["actor/grad_norm"] > 0


def test_distillation_makes_the_policy_likelier_to_say_what_the_teacher_would(
    tmp_path: Path, tiny_llama: Callable, made: list[Experience]
):
    teacher, _ = tiny_llama(tie=True)
    loss = "actor_rollout_ref.actor.policy_loss"
    settings = [
        f"{loss}.loss_mode=distillation",
        f"{loss}.teacher_path={teacher}",
        f"{loss}.use_task_rewards=false",
    ]
    run_locally(tmp_path, tiny_llama, *SETTINGS, "algorithm.adv_estimator=grpo", *settings, steps=6)
    columns = padded(made[0].batch).batch
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)(
            **inputs
        ).logits[:, -7:-1]
    expected = (
        logits.log_softmax(-1).gather(-1, columns["responses"].unsqueeze(-1)).squeeze(-1).float()
    )
    torch.testing.assert_close(
        columns["teacher_log_prob"], expected * columns["response_mask"], rtol=0, atol=1e-4
    )
    steps = metrics_of(tmp_path)
    assert steps[-1]["distillation/abs_loss"] < 0.9 * steps[0]["distillation/abs_loss"]
    assert steps[0]["perf/mfu/teacher"] > 0
