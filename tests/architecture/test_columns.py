"""Every column that a worker declares to read or write is in the table of columns."""

import pytest

from verl_like.protocol import COLUMNS
from verl_like.single_controller.decorator import registered_methods
from verl_like.workers.actor import ActorWorker
from verl_like.workers.agent_worker import AgentWorker
from verl_like.workers.copies import ActorCopyWorker, CriticCopyWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.teacher import TeacherWorker


@pytest.mark.parametrize(
    "worker_class",
    [
        *(
            ActorWorker,
            AgentWorker,
            ReferenceWorker,
            RolloutWorker,
            CriticWorker,
            RewardModelWorker,
            TeacherWorker,
        ),
        *(ActorCopyWorker, CriticCopyWorker),
    ],
)
def test_declared_columns_are_in_the_table(worker_class: type):
    declared = {
        (spec.name, column.removesuffix("?"))
        for spec in registered_methods(worker_class).values()
        for column in (*(spec.reads or ()), *(spec.writes or ()))
    }
    assert declared
    missing = sorted(f"{method}: {column}" for method, column in declared if column not in COLUMNS)
    assert not missing, f"add a row to verl_like/protocol/columns.py for {missing}"


def test_columns_that_the_trainer_itself_writes_are_in_the_table():
    written = {
        "response_mask",
        "token_level_scores",
        "token_level_rewards",
        "advantages",
        "returns",
    }
    written |= {"rollout_is_weights", "sampled_mask", "selected_tokens"}
    written |= {
        "rule_scores",
        "is_skipped",
        "uid",
        "data_source",
        "reward_model",
        "extra_info",
        "raw_prompt",
    }
    assert written <= COLUMNS.keys()
