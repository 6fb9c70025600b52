"""Which prompts dynamic sampling keeps, and the rewards by name, on batches whose scores are
given."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto, Metric, metric_values
from verl_like.protocol.padded import padded, view_of_samples
from verl_like.protocol.row_ops import jagged_from_lists, jagged_parts
from verl_like.trainer.config import ConfigError, load_ppo_config
from verl_like.trainer.ppo.experience_maker import ExperienceMaker, Generated, Scored
from verl_like.trainer.ppo.scoring import groups_differ, scores_by_reward

NAN = float("nan")
# The scores of the three responses to each prompt.
SCORES = {
    "a": [1, 1, 1],
    "b": [0, 1, 0],
    "c": [2, 2, 2],
    "d": [0, 0, 3],
    "e": [1, 0, 0],
    "f": [4, 4, 4],
    "g": [0, 0, 1],
}


def scored_batch(uids, skipped=(), extra=None):
    """Three responses of two tokens to each prompt."""
    scores = [score for uid in uids for score in SCORES[uid]]
    is_skipped_B = torch.zeros(len(scores), dtype=torch.bool)
    is_skipped_B[list(skipped)] = True
    ones = jagged_from_lists([[1, 1]] * len(scores), torch.int64)
    return DataProto.from_dict(
        tensors={
            **dict.fromkeys(("prompts", "responses", "response_mask"), ones),
            "rule_scores": jagged_from_lists([[0, score] for score in scores], torch.float32),
            "is_skipped": is_skipped_B,
        },
        non_tensors={"uid": np.repeat(np.array(list(uids), dtype=object), 3), **(extra or {})},
        meta_info={"padding": (2, 2, 0)},
    )


def with_turns(batch):
    """The batch with two rows for the second response to each prompt, each of which has half of its
    score."""
    is_second_B = np.arange(len(batch)) % 3 == 1
    rows = np.repeat(np.arange(len(batch)), 1 + is_second_B)
    turns = batch[rows]
    turns.batch["sample_id"] = torch.from_numpy(rows) + 20
    jagged_parts(turns.batch["rule_scores"])[0].view(-1, 2)[is_second_B[rows]] /= 2
    return turns


class ScriptedMaker(ExperienceMaker):
    """Generates and scores by the table above."""

    scored_batch = staticmethod(scored_batch)

    def generate_with_baselines(self, prompts, generation=None):
        uids = prompts.non_tensor_batch["uid"].tolist()
        assert prompts.meta_info == {"global_steps": 7}
        batch = self.scored_batch(uids)
        scores = batch.select(batch_keys=["rule_scores", "is_skipped"], non_tensor_batch_keys=[])
        scores.meta_info["metrics"] = {"reward/num_skipped": Metric.sum(len(uids))}
        pending = SimpleNamespace(complete=lambda _: SimpleNamespace(get=lambda: scores))
        batch.batch = batch.batch.exclude("rule_scores", "is_skipped")
        return Generated(batch, pending, {"rollout/other": Metric.sum(1)})


class TurnsMaker(ScriptedMaker):
    """Of three samples the second one has two rows."""

    scored_batch = staticmethod(lambda uids: with_turns(scored_batch(uids)))


REQUIRED = [
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.model.path=c",
    "actor_rollout_ref.rollout.n=3",
]


def maker(estimator, kind=ScriptedMaker, **algorithm):
    settings = [f"algorithm.{key}={json.dumps(value)}" for key, value in algorithm.items()]
    config = load_ppo_config([*REQUIRED, f"algorithm.adv_estimator={estimator}", *settings])
    others = dict.fromkeys(["rule_scorer", "kl_controller", "model_cost", "timer"])
    return kind(config=config, groups={}, reward_columns={"rule_scores": 3.0}, **others)


def prompts_of(*uids, **meta_info):
    return DataProto.from_dict(
        tensors={"prompts": jagged_from_lists([[1]] * len(uids), torch.int64)},
        non_tensors={"uid": np.array(uids, dtype=object)},
        meta_info=meta_info,
    )


def made(max_num_gen_batches, *batches):
    """The prompts of the batch's responses and the metrics, when the batches of prompts come one
    after the other."""
    return names_and_counts(*sampled(ScriptedMaker, max_num_gen_batches, *batches), batches)


def sampled(kind, max_num_gen_batches, *batches):
    """The batch and the metrics."""
    more = iter([prompts_of(*uids) for uids in batches[1:]])
    options = {
        "filter_groups.enable": True,
        "filter_groups.max_num_gen_batches": max_num_gen_batches,
    }
    first = prompts_of(*batches[0], global_steps=7)
    generated = maker("grpo", kind, **options).sample(first, lambda: next(more))
    assert generated.scores is None
    return generated.batch, generated.metrics


def names_and_counts(batch, metrics, batches):
    """The prompts of the samples, and the numbers of what was kept and dropped."""
    view = view_of_samples(batch)
    uids = view.non_tensor_batch["uid"].reshape(-1, 3)
    assert (uids == uids[:, :1]).all()  # the samples of a prompt stay together
    assert view.batch["rule_scores"].sum(-1).reshape(-1, 3).tolist() == [
        SCORES[uid] for uid in uids[:, 0]
    ]
    values = metric_values(metrics)
    assert values["reward/num_skipped"] == sum(map(len, batches)) and values[
        "rollout/other"
    ] == len(batches)
    return "".join(uids[:, 0]), [
        values[f"rollout/num_{name}"]
        for name in ("prompt_batches", "equal_groups", "filler_groups", "surplus_groups")
    ]


def test_prompts_without_a_difference_are_replaced_until_the_batch_is_full():
    assert made(5, "ab", "cd") == ("bd", [2, 2, 0, 0])


def test_a_batch_in_which_all_prompts_differ_is_left_as_it_is():
    assert made(5, "bdg") == ("bdg", [1, 0, 0, 0])


def test_prompts_that_the_batch_has_no_room_for_are_counted():
    assert made(5, "acb", "deg") == ("bde", [2, 2, 0, 1])


def test_after_the_last_allowed_batch_dropped_prompts_fill_the_rest_in_their_order():
    assert made(2, "acf", "fda") == ("dac", [2, 5, 2, 0])


@pytest.mark.parametrize(
    ("max_num_gen_batches", "batches", "names", "counts"),
    [(5, ("acb", "deg"), "bde", [2, 2, 0, 1]), (2, ("acf", "fda"), "dac", [2, 5, 2, 0])],
)
def test_samples_of_several_rows_count_as_one_and_come_out_whole(
    max_num_gen_batches, batches, names, counts
):
    batch, metrics = sampled(TurnsMaker, max_num_gen_batches, *batches)
    assert names_and_counts(batch, metrics, batches) == (names, counts)
    assert batch.non_tensor_batch["uid"].tolist() == [name for name in names for _ in range(4)]
    # The same numbers of two batches of prompts are samples of their own.
    assert batch.batch["sample_id"].tolist() == [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8]


def test_groups_of_samples_with_several_rows_differ_by_their_sums_on_all_rows():
    assert (
        groups_differ(with_turns(scored_batch("abc")), "reward").tolist()
        == [False] * 4 + [True] * 4 + [False] * 4
    )
    # A number beside the score is that of the sample's first row, as is whether it was skipped.
    batch = with_turns(
        scored_batch("ad", extra={"reward_extra/acc": np.array([1, 2, 1, 3, 3, 3.0])})
    )
    batch.non_tensor_batch["reward_extra/acc"][[2, 6]] = 9
    assert groups_differ(batch, "acc").tolist() == [True] * 4 + [False] * 4


def test_groups_differ_by_the_score_or_a_named_number_of_the_responses_that_were_scored():
    # b without its second response: 0, 0. d without two: one score is no difference.
    batch = scored_batch(
        "abd",
        skipped=[4, 6, 7],
        extra={"reward_extra/acc": np.array([0, 1, 1, 2, NAN, 2, 5, 6, 7.0])},
    )
    assert groups_differ(scored_batch("abd"), "reward").tolist() == [False] * 3 + [True] * 6
    assert groups_differ(batch, "reward").tolist() == [False] * 9
    assert groups_differ(batch, "acc").tolist() == [True] * 3 + [False] * 6
    with pytest.raises(
        ValueError,
        match=r"filter_groups\.metric=ac, but the reward function returns only reward, acc",
    ):
        groups_differ(batch, "ac")


@pytest.mark.parametrize("number", [0.1, 0.7, 1 / 3, 1e-30, -1e30])
def test_equal_numbers_do_not_differ_though_their_mean_is_rounded(number):
    # Eight times 0.1 has the mean 0.09999999999999999 in float64.
    batch = scored_batch("b" * 8)
    batch.batch["rule_scores"] = torch.full_like(batch.batch["rule_scores"], number)
    batch.non_tensor_batch |= {
        "uid": np.repeat(["x", "y"], [8, 16]),
        "reward_extra/acc": np.full(24, number),
    }
    assert not groups_differ(batch, "reward").any() and not groups_differ(batch, "acc").any()


def test_numbers_that_differ_in_their_last_digit_differ():
    numbers = np.full(9, 0.1)
    numbers[4] = np.nextafter(0.1, 1)
    batch = scored_batch("bde", extra={"reward_extra/acc": numbers})
    assert groups_differ(batch, "acc").tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_a_number_that_is_missing_or_of_a_skipped_sample_makes_no_difference():
    # a lacks its second number; of b the one that differs is skipped; c has none; d has two that
    # differ.
    numbers = np.array([5, NAN, 5, 2, 2, 3, NAN, NAN, NAN, NAN, 1, 0])
    batch = scored_batch("abcd", skipped=[5], extra={"reward_extra/acc": numbers})
    assert groups_differ(batch, "acc").tolist() == [False] * 9 + [True] * 3


def test_rewards_by_name_are_the_weighted_columns_and_the_numbers_on_the_last_token():
    words = np.array(["x", "y", "z"], dtype=object)
    batch = padded(
        scored_batch(
            "b", extra={"reward_extra/acc": np.array([0.5, 0.25, 2]), "reward_extra/word": words}
        )
    )
    batch.batch["response_mask"][2, 1] = 0
    rewards = scores_by_reward(batch, {"rule_scores": 3.0})
    assert list(rewards) == ["rule_scores", "acc"]
    assert torch.equal(rewards["rule_scores"], torch.tensor([[0.0, 0], [0, 3], [0, 0]]))
    assert torch.equal(rewards["acc"], torch.tensor([[0.0, 0.5], [0, 0.25], [2, 0]]))


def test_gdpo_gets_the_rewards_that_its_keys_name():
    # The scores 0, 1, 0 deviate from their mean by (-1, 2, -1) / 3, with std 1 / sqrt(3); the
    # weight of 3 cancels; acc deviates by 1, 0, -1 and has std 1. The sum with the weights 1 and 2
    # is whitened over two tokens each.
    batch = padded(scored_batch("b", extra={"reward_extra/acc": np.array([2.0, 1, 0])}))
    batch.batch["token_level_rewards"] = torch.zeros(3, 2)
    options = {"gdpo_reward_keys": ["rule_scores", "acc"], "gdpo_reward_weights": [1.0, 2.0]}
    columns = maker("gdpo", **options).estimate(Scored(batch, batch, None, {})).batch.batch
    third = 3**0.5 / 3
    summed = np.array([-third + 2, 2 * third, -third - 2]).repeat(2).reshape(3, 2)
    expected = (summed - summed.mean()) / summed.std(ddof=1)
    np.testing.assert_allclose(columns["advantages"].numpy(), expected, rtol=1e-5)


def test_gdpo_without_the_division_counts_rewards_by_the_weights_of_their_columns():
    # The scores 0, 1, 0 weigh 3: they deviate from their mean by -1, 2, -1. acc deviates by 1, 0,
    # -1.
    batch = padded(scored_batch("b", extra={"reward_extra/acc": np.array([2.0, 1, 0])}))
    batch.batch["token_level_rewards"] = torch.zeros(3, 2)
    options = {"gdpo_reward_keys": ["rule_scores", "acc"], "norm_adv_by_std_in_grpo": False}
    columns = maker("gdpo", **options).estimate(Scored(batch, batch, None, {})).batch.batch
    summed = np.array([0.0, 2, -2]).repeat(2).reshape(3, 2)
    expected = (summed - summed.mean()) / summed.std(ddof=1)
    np.testing.assert_allclose(columns["advantages"].numpy(), expected, rtol=1e-5)


def test_one_missing_number_leaves_the_advantages_of_all_samples_numbers():
    batch = padded(scored_batch("be", extra={"reward_extra/acc": np.array([2.0, 1, NAN, 5, 6, 9])}))
    batch.batch["token_level_rewards"] = torch.zeros(6, 2)
    columns = (
        maker("gdpo", gdpo_reward_keys=["rule_scores", "acc"])
        .estimate(Scored(batch, batch, None, {}))
        .batch.batch
    )
    advantages = columns["advantages"]
    assert advantages.isfinite().all() and (advantages != 0).all()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=1"],
            "compares the responses to one prompt",
        ),
        (
            [
                "algorithm.filter_groups.enable=true",
                "reward_model.enable=true",
                "reward_model.model.path=d",
            ],
            "drops prompts before the reward model scores",
        ),
        (
            ["reward.overlong_buffer.enable=true"],
            "reward.overlong_buffer.len=0 must be between 1 and",
        ),
        (
            [
                "reward.overlong_buffer.enable=true",
                "reward.overlong_buffer.len=9",
                "data.max_response_length=8",
            ],
            "len=9 must be between 1 and data.max_response_length=8",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(overrides, why):
    with pytest.raises(ConfigError, match=why):
        load_ppo_config([*REQUIRED, *overrides])


def test_an_estimator_is_refused_that_would_not_see_a_penalty():
    of_the_sum, of_each = (
        ["critic.enable=false", f"algorithm.adv_estimator={name}"] for name in ("grpo", "gdpo")
    )
    of_each.append("algorithm.gdpo_reward_keys=[rule_scores]")
    load_ppo_config([*REQUIRED, *of_each])
    load_ppo_config([*REQUIRED, *of_the_sum, "algorithm.use_kl_in_reward=true"])
    with pytest.raises(
        ConfigError,
        match=r"gdpo reads each reward by itself.*penalty of algorithm\.use_kl_in_reward",
    ):
        load_ppo_config([*REQUIRED, *of_each, "algorithm.use_kl_in_reward=true"])
