"""Samples that were skipped, and tokens that do not count: what each rule of the maker makes of
them, by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl_like.algorithms.kl import get_kl_controller
from verl_like.protocol import DataProto, Metric, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.experience_maker import ExperienceMaker, Generated, Scored

REQUIRED = [
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.model.path=c",
    "actor_rollout_ref.rollout.n=2",
]

# Four responses of at most four tokens: of two tokens; of four with a tool's two in the middle; of
# four, skipped; of three with a tool's one.
COUNTS = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1], [1, 0, 1, 0]])
ATTENDED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]])
SKIPPED = torch.tensor([False, False, True, False])


def maker_of(*overrides: str, **parts: Any) -> ExperienceMaker:
    config = load_ppo_config([*REQUIRED, *overrides])
    nothing = dict.fromkeys(["rule_scorer", "model_cost", "timer"])
    columns = {"rule_scores": 1.0}
    controller = get_kl_controller(config.algorithm.kl_ctrl)
    return ExperienceMaker(
        config=config,
        groups={},
        reward_columns=columns,
        kl_controller=controller,
        **nothing | parts,
    )


def responses(**further: torch.Tensor) -> Scored:
    """The four responses after a prompt of two tokens; each scores its number, from 1 on its last
    token that counts."""
    scores = torch.zeros(4, 4)
    for row, last in enumerate([1, 3, 3, 2]):
        scores[row, last] = row + 1
    columns = {
        "attention_mask": torch.cat([torch.tensor([[0, 1]] * 4), ATTENDED], dim=1),
        "response_mask": COUNTS,
        "rule_scores": scores,
        "is_skipped": SKIPPED,
    }
    uids = np.array(["a", "a", "b", "b"], dtype=object)
    return scored(
        DataProto.from_dict(columns | further, {"uid": uids}, meta_info={"global_steps": 3})
    )


def scored(batch: DataProto) -> Scored:
    return Scored(batch, rows=batch, work=None, metrics={})


def test_a_skipped_sample_leaves_the_mask_and_the_sum_of_scores_stays():
    rewarded = maker_of().reward(responses())
    columns = rewarded.batch.batch
    assert rewarded.metrics == {}
    assert columns["response_mask"].tolist() == (COUNTS * ~SKIPPED.unsqueeze(-1)).tolist()
    assert columns["token_level_scores"].sum(-1).tolist() == [1, 2, 3, 4]
    assert torch.equal(columns["token_level_rewards"], columns["token_level_scores"])


def test_the_overlong_penalty_counts_drawn_tokens_and_not_those_that_a_tool_wrote():
    # Of at most 4 tokens, from 1 on: 0.5 at 2 tokens, 1 at 3 and 1.5 at 4. The first, second and
    # fourth have 2 drawn ones, of 2, 4 and 3.
    settings = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=3"]
    settings += ["reward.overlong_buffer.penalty_factor=1.5", "data.max_response_length=4"]
    rewarded = maker_of(*settings).reward(responses())
    scores_BR = rewarded.batch.batch["token_level_scores"]
    # The third is skipped: it has no token on which a penalty could stand.
    assert scores_BR.sum(-1).tolist() == [1 - 0.5, 2 - 0.5, 3, 4 - 0.5]
    assert scores_BR[1].tolist() == [0, 0, 0, 1.5]
    assert metric_values(rewarded.metrics) == {"reward/overlong_penalty": -0.5}


def test_the_overlong_penalty_of_a_batch_of_which_all_was_skipped_is_none():
    settings = [
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=2",
        "data.max_response_length=4",
    ]
    rewarded = maker_of(*settings).reward(responses(is_skipped=torch.ones(4, dtype=torch.bool)))
    assert (
        rewarded.metrics["reward/overlong_penalty"].weight == 0
        and not rewarded.batch.batch["response_mask"].any()
    )


def test_the_adaptive_coefficient_counts_the_samples_that_were_scored():
    # With d = 2, 1, (9), 4 at each token, the KL is (2 + 1 + 4) / 3; that of the skipped sample
    # does not count. The target of 1 is exceeded by more than 20%: the coefficient grows by 0.2 * 3
    # / 10000.
    shift = torch.tensor([[2.0], [1.0], [9.0], [4.0]]).expand(4, 4)
    before = responses(old_log_probs=shift.clone(), ref_log_prob=torch.zeros(4, 4))
    settings = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
    maker = maker_of(*settings, "algorithm.kl_ctrl.kl_coef=0.5", "algorithm.kl_ctrl.target_kl=1.0")
    rewarded = maker.reward(before)
    metrics, columns = rewarded.metrics, rewarded.batch.batch
    assert metrics["actor/reward_kl_penalty"] == Metric.mean(
        metrics["actor/reward_kl_penalty"].value, weight=3
    )
    assert metrics["actor/reward_kl_penalty"].value == pytest.approx(7 / 3)
    assert metrics["actor/reward_kl_penalty_coeff"] == Metric.mean(0.5, weight=3)
    assert maker.kl_controller.value == pytest.approx(0.5 * (1 + 0.2 * 3 / 10_000), rel=1e-12)
    # The penalty is on the tokens that count, and nothing of the skipped sample is left.
    expected = (columns["token_level_scores"] - 0.5 * shift) * COUNTS * ~SKIPPED.unsqueeze(-1)
    torch.testing.assert_close(columns["token_level_rewards"], expected)


def test_the_adaptive_coefficient_stays_where_every_sample_was_skipped():
    columns = {"old_log_probs": torch.ones(4, 4), "ref_log_prob": torch.zeros(4, 4)}
    skipped = responses(**columns, is_skipped=torch.ones(4, dtype=torch.bool))
    maker = maker_of("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")
    before = maker.kl_controller.value
    rewarded = maker.reward(skipped)
    assert (
        maker.kl_controller.value == before
        and not rewarded.batch.batch["token_level_rewards"].any()
    )


class AnswersGreedily(ExperienceMaker):
    """Generates two responses to each of two prompts; the greedy answer to the second one is
    skipped."""

    def generate(self, prompts: DataProto, num_samples: int, generation: Any = None) -> Any:
        is_greedy = prompts.meta_info.get("greedy", False)
        assert num_samples == (1 if is_greedy else 2)
        uids = prompts.non_tensor_batch["uid"].repeat(num_samples)
        ones = jagged_from_lists([[1, 1]] * len(uids), torch.int64)
        columns = dict.fromkeys(("prompts", "responses", "response_mask"), ones)
        batch = DataProto.from_dict(columns, {"uid": uids}, {"padding": (2, 3, 0)})
        rows = [[0.0, 5.0], [0.0, 7.0]] if is_greedy else [[0.0, 1.0]] * 4
        scores = jagged_from_lists(rows, torch.float32)
        skipped = torch.tensor([False, True]) if is_greedy else torch.zeros(4, dtype=torch.bool)
        of_rules = DataProto.from_dict(
            {"rule_scores": scores, "is_skipped": skipped}, meta_info={"metrics": {}}
        )
        return Generated(
            batch, SimpleNamespace(complete=lambda _: SimpleNamespace(get=lambda: of_rules)), {}
        )


def test_remax_takes_nothing_from_a_greedy_answer_that_was_skipped():
    maker = maker_of("algorithm.adv_estimator=remax")
    maker = AnswersGreedily(**vars(maker))
    prompts = DataProto.from_dict(non_tensors={"uid": np.array(["a", "b"], dtype=object)})
    generated = maker.generate_with_baselines(prompts)
    assert "greedy" not in prompts.meta_info
    torch.testing.assert_close(
        generated.batch.batch["reward_baselines"],
        torch.tensor([5.0, 5.0, torch.nan, torch.nan]),
        equal_nan=True,
    )
    rewarded = maker.reward(scored(padded(maker.with_scores(generated).batch)))
    columns = maker.estimate(rewarded).batch.batch
    assert columns["advantages"].tolist() == [[-4, -4, 0], [-4, -4, 0], [0, 0, 0], [0, 0, 0]]
    assert columns["returns"].tolist() == [[1, 1, 0]] * 4


def test_a_sample_that_is_skipped_counts_nothing_in_a_validation():
    prompts = DataProto.from_dict(non_tensors={"uid": np.array(["a", "b"], dtype=object)})
    prompts.meta_info["greedy"] = True
    _, scores_B, _ = AnswersGreedily(**vars(maker_of())).generate_and_score(prompts, num_samples=1)
    assert scores_B.tolist() == [5.0, 0.0]


def test_what_a_correction_removes_leaves_the_loss_and_stays_among_what_was_sampled():
    kept = COUNTS * torch.tensor([1, 0, 1, 1])
    corrected = replace(responses(response_mask=COUNTS * ~SKIPPED.unsqueeze(-1)), kept_BR=kept)
    correction = "algorithm.rollout_correction.rollout_rs"
    maker = maker_of(f"{correction}=token_k1", f"{correction}_threshold=0.5_2.0")
    chosen = maker.choose_tokens(corrected).batch.batch
    assert torch.equal(chosen["response_mask"], kept)
    assert torch.equal(chosen["sampled_mask"], COUNTS * ~SKIPPED.unsqueeze(-1))
    plain = maker_of().choose_tokens(responses()).batch.batch
    assert torch.equal(plain["response_mask"], COUNTS) and "sampled_mask" not in plain


def drawn_tokens(step: int) -> torch.Tensor:
    """The tokens that clip_cov leaves out in a step, of 200 with the same covariance."""
    settings = ["actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"]
    settings += [
        f"actor_rollout_ref.actor.policy_loss.clip_cov_{key}"
        for key in ("ratio=0.1", "lb=0.5", "ub=2.0")
    ]
    signs = torch.tensor([1.0, -1.0]).repeat(100).view(1, 200)
    columns = {"old_log_probs": signs, "advantages": signs, "response_mask": torch.ones(1, 200)}
    batch = DataProto.from_dict(columns, meta_info={"global_steps": step})
    return maker_of(*settings).choose_tokens(scored(batch)).batch.batch["selected_tokens"]


def test_clip_cov_draws_other_tokens_in_every_step_and_the_same_ones_again():
    draws = {step: drawn_tokens(step) for step in (0, 1, 2, 57)}
    assert all(int(drawn.sum()) == 20 for drawn in draws.values())
    assert len({tuple(drawn[0].tolist()) for drawn in draws.values()}) == 4
    assert torch.equal(drawn_tokens(57), draws[57])


class AnswersWhatHasBegun(AnswersGreedily):
    """Its greedy answers were not scored by rules, so none of them says that it was skipped."""

    def generate(self, prompts: DataProto, num_samples: int, generation: Any = None) -> Any:
        self.generations.append(generation)
        return super().generate(prompts, num_samples)

    def generate_and_score(self, prompts: DataProto, num_samples: int) -> Any:
        return prompts, torch.tensor([2.0, 3.0]), {}


@pytest.mark.parametrize(("estimator", "baselines"), [("remax", [2, 2, 3, 3]), ("rloo", None)])
def test_responses_that_are_generated_already_are_taken_with_and_without_baselines(
    estimator: str, baselines: list[int] | None
):
    maker = AnswersWhatHasBegun(**vars(maker_of(f"algorithm.adv_estimator={estimator}")))
    maker.generations = []
    begun: Any = object()
    uids = np.array(["a", "b"], dtype=object)
    prompts = DataProto.from_dict({"prompt": torch.zeros(2)}, {"uid": uids})
    columns = maker.generate_with_baselines(prompts, begun).batch.tensor_batch
    assert maker.generations == [begun]
    if baselines is None:
        assert "reward_baselines" not in columns
    else:
        assert columns["reward_baselines"].tolist() == baselines
