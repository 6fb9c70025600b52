"""Which columns are the reward: those that the worker classes declare, by their weights, and no others."""

from typing import ClassVar

import pytest
import torch

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker
from verl_like.trainer.scoring import reward_columns, total_scores
from verl_like.workers.reward_model import RewardModelWorker


class Judge(Worker):
    """A role that writes a reward and something to log, whose name looks like a reward's."""

    reward_columns: ClassVar = {"politeness": -0.5}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, writes=["politeness", "logged_scores"])
    def annotate(self, data: DataProto) -> DataProto:
        return data


class Silent(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def annotate(self, data: DataProto) -> DataProto:
        return data


def test_the_reward_is_the_weighted_sum_of_the_declared_columns_alone():
    columns = reward_columns({"judge": Judge, "silent": Silent, "reward_model": RewardModelWorker}, with_rules=True)
    assert columns == {"rule_scores": 1.0, "politeness": -0.5, "rm_scores": 1.0}
    batch = DataProto.from_dict(
        tensors={
            "rule_scores": torch.tensor([[0.0, 1.0], [3.0, 0.0]]),
            "rm_scores": torch.tensor([[0.0, 0.25], [0.5, 0.0]]),
            "politeness": torch.tensor([[0.0, 4.0], [-1.0, 0.0]]),
            "logged_scores": torch.full((2, 2), 100.0),
        }
    )
    assert total_scores(batch, columns).tolist() == [[0.0, 1.0 + 0.25 - 2.0], [3.0 + 0.5 + 0.5, 0.0]]


def test_without_a_rule_a_reward_model_or_a_role_that_rewards_there_is_no_reward():
    assert reward_columns({"actor": Worker, "silent": Silent}, with_rules=False) == {}


def test_a_reward_column_that_nothing_writes_is_refused():
    class Misspelt(Judge):
        reward_columns: ClassVar = {"politness": 1.0}

    with pytest.raises(ValueError, match=r"Misspelt.reward_columns has 'politness'.*writes=\[...\] of its annotate"):
        reward_columns({"judge": Misspelt}, with_rules=True)


def test_a_reward_column_of_two_roles_is_refused():
    with pytest.raises(ValueError, match="'politeness', which another role or the rules write as well: rename"):
        reward_columns({"judge": Judge, "second_judge": Judge}, with_rules=True)


def test_a_reward_column_of_a_role_that_validation_does_not_call_is_refused():
    with pytest.raises(ValueError, match="'politeness', but only a reward model and custom roles reward, not the"):
        reward_columns({"ref": Judge}, with_rules=True)
