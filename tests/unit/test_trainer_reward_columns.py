"""Which columns are the reward: those that the worker classes declare, by their weights, and no
others."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto, Future, Metric
from verl_like.rewards.manager import RewardError
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.ppo.scoring import ModelScores, reward_columns, reward_means, total_scores
from verl_like.workers.config.roles import RewardModelConfig
from verl_like.workers.reward_model import RewardModelWorker


class Judge(Worker):
    """A role that writes a reward and something to log, whose name looks like a reward's."""

    reward_columns: ClassVar = {"politeness": -0.5}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, writes=["politeness", "logged_scores"])
    def annotate(self, data: DataProto) -> DataProto:
        return data


class Done(Future[DataProto]):
    """A call that has ended."""

    def __init__(self, value: DataProto) -> None:
        self._finished, self._error, self._value = True, None, value


class Silent(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def annotate(self, data: DataProto) -> DataProto:
        return data


def columns_of(
    classes: dict[str, type[Worker]], models: dict[str, RewardModelConfig], *, with_rules: bool
) -> dict[str, float]:
    mapping = {role: ClassWithInitArgs(worker_class) for role, worker_class in classes.items()}
    return reward_columns(mapping, models, with_rules)


def test_the_reward_is_the_weighted_sum_of_the_declared_columns_alone():
    classes = {"judge": Judge, "silent": Silent, "reward_model": RewardModelWorker}
    columns = columns_of(
        classes, {"reward_model": RewardModelConfig.model_construct(weight=1.0)}, with_rules=True
    )
    assert columns == {"rule_scores": 1.0, "politeness": -0.5, "rm_scores": 1.0}
    batch = DataProto.from_dict(
        tensors={
            "rule_scores": torch.tensor([[0.0, 1.0], [3.0, 0.0]]),
            "rm_scores": torch.tensor([[0.0, 0.25], [0.5, 0.0]]),
            "politeness": torch.tensor([[0.0, 4.0], [-1.0, 0.0]]),
            "logged_scores": torch.full((2, 2), 100.0),
        }
    )
    assert total_scores(batch, columns).tolist() == [
        [0.0, 1.0 + 0.25 - 2.0],
        [3.0 + 0.5 + 0.5, 0.0],
    ]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_refused_with_its_column_unless_its_sample_was_skipped(wrong):
    scores = torch.tensor([[0.0, 4.0], [wrong, 0.0], [0.0, wrong]])
    skipped = torch.tensor([False, True, False])
    batch = DataProto.from_dict(
        {"rule_scores": torch.zeros(3, 2), "rm_scores": scores, "is_skipped": skipped}
    )
    with pytest.raises(
        RewardError,
        match=r"'rm_scores' of 1 of 3 samples is no finite number, the first of them row 2",
    ):
        total_scores(batch, {"rule_scores": 1.0, "rm_scores": 0.5})
    batch.batch["is_skipped"][2] = True
    assert total_scores(batch, {"rule_scores": 1.0, "rm_scores": 0.5})[0].tolist() == [0.0, 2.0]


class HalvingRewardModel(RewardModelWorker):
    reward_columns: ClassVar = {"rm_scores": 0.5}


def test_each_reward_model_has_a_column_and_a_weight_of_its_own():
    classes = {"reward_model": HalvingRewardModel, "safety": RewardModelWorker, "judge": Judge}
    models = {
        "reward_model": RewardModelConfig.model_construct(weight=3.0),
        "safety": RewardModelConfig.model_construct(weight=-0.25),
    }
    columns = columns_of(classes, models, with_rules=False)
    assert columns == {"rm_scores": 1.5, "rm_scores/safety": -0.25, "politeness": -0.5}
    scores = torch.tensor([[0.0, 4.0], [2.0, 0.0], [0.0, 6.0]])
    batch = DataProto.from_dict(
        {"response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]]), "politeness": 0 * scores}
    )
    for role, factor in (("reward_model", 1.0), ("safety", 10.0)):
        returned = DataProto.from_dict({"rm_scores": factor * scores}, meta_info={"metrics": {}})
        batch = batch.union(ModelScores(role, Done(returned)).get())
    # 1.5 * 4 - 0.25 * 40, 1.5 * 2 - 0.25 * 20, 1.5 * 6 - 0.25 * 60
    assert total_scores(batch, columns).tolist() == [[0.0, -4.0], [-2.0, 0.0], [0.0, -6.0]]
    # The last sample was skipped.
    means = {name: metric.value for name, metric in reward_means(batch, columns).items()}
    assert means == {
        "reward/rm_scores/mean": 3.0,
        "reward/rm_scores/safety/mean": 30.0,
        "reward/politeness/mean": 0.0,
    }
    assert reward_means(batch, {"rm_scores": 2.0}) == {}, "it is critic/score/mean"


def test_the_numbers_beside_a_rules_score_are_means_over_the_samples_that_were_scored_and_have_them():
    nan = float("nan")
    batch = DataProto.from_dict(
        {
            "response_mask": torch.tensor([[1, 0], [1, 1], [1, 0], [0, 0]]),
            "rule_scores": torch.zeros(4, 2),
        },
        {
            "reward_extra/acc": np.array([1.0, nan, 0.25, 8.0]),
            "reward_extra/text": np.array(list("abcd"), dtype=object),
        },
    )
    means = reward_means(batch, {"rule_scores": 1.0})
    assert means == {"reward/acc/mean": Metric.mean(0.625, weight=2)}  # the last sample was skipped


def test_without_a_rule_a_reward_model_or_a_role_that_rewards_there_is_no_reward():
    assert columns_of({"actor": Worker, "silent": Silent}, {}, with_rules=False) == {}


def test_a_reward_column_that_nothing_writes_is_refused():
    class Misspelt(Judge):
        reward_columns: ClassVar = {"politness": 1.0}

    with pytest.raises(
        ValueError, match=r"Misspelt.reward_columns has 'politness'.*writes=\[...\] of its annotate"
    ):
        columns_of({"judge": Misspelt}, {}, with_rules=True)


def test_a_reward_column_of_two_roles_is_refused():
    with pytest.raises(
        ValueError, match="'politeness', which another role or the rules write as well: rename"
    ):
        columns_of({"judge": Judge, "second_judge": Judge}, {}, with_rules=True)


def test_a_reward_column_of_a_role_that_validation_does_not_call_is_refused():
    with pytest.raises(
        ValueError, match="'politeness', but only a reward model and custom roles reward, not the"
    ):
        columns_of({"ref": Judge}, {}, with_rules=True)
