"""A trainer of detached training, in one process: where it meets the others, and what it learns from."""

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_detached_config import IN_FLIGHT, config_of

from verl_like.protocol import DataProto
from verl_like.trainer.detached.config import DetachedConfig
from verl_like.trainer.detached.detached_trainer import DetachedPPOTrainer
from verl_like.trainer.detached.side import SideRecorder
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.planning.flops import ModelCost


class Seen(Exception):
    """Ends what a test looks into, with what it has seen."""


def trainer(config: DetachedConfig, **fields: Any) -> Any:
    """The trainer itself, without the actor that it is."""
    side = object.__new__(DetachedPPOTrainer.__ray_metadata__.modified_class)
    recorder = SideRecorder("trainer_2", node="")
    vars(side).update({"config": config, "model_fn": None, "pools": None, "recorder": recorder, **fields})
    return side


def test_the_trainers_of_a_model_meet_at_the_address_that_they_are_given(monkeypatch: pytest.MonkeyPatch):
    def start_groups(*arguments: Any) -> None:
        raise Seen(arguments[-1])

    env_info = {"rank": 2, "world_size": 3, "master_addr": "10.0.0.7", "master_port": "4321"}
    config = config_of("detached.num_trainers=3", "actor_rollout_ref.actor.ppo_mini_batch_size=12")
    side = trainer(config.of_trainer("trainer_2"), index=2, env_info=env_info)
    # Ray may have made the class again, whose functions then have a module's names of their own.
    names = inspect.unwrap(type(side).start).__globals__
    monkeypatch.setitem(names, "start_groups", start_groups)
    with pytest.raises(Seen) as seen:
        side.start()
    assert seen.value.args == (JointTrainer(2, 3, "10.0.0.7", 4321),)
    side.env_info = {"rank": 0, "world_size": 1}
    with pytest.raises(Seen) as seen:
        side.start()
    assert seen.value.args == (None,)


@pytest.mark.parametrize("bypass", [True, False])
def test_a_bypass_takes_the_log_probabilities_of_the_engine_for_the_actors(bypass: bool):
    def learn(experience: Any) -> None:
        raise Seen(experience.batch)

    settings = [*IN_FLIGHT, "algorithm.adv_estimator=grpo"] if bypass else []
    columns = {"attention_mask": torch.ones(2, 5), "position_ids": torch.arange(5).expand(2, 5)}
    columns |= {"response_mask": torch.ones(2, 2), "rollout_log_probs": torch.tensor([[-0.5, -1.0], [-0.25, -2.0]])}
    if not bypass:
        columns["old_log_probs"] = torch.tensor([[-0.75, -1.5], [-0.5, -3.0]])
    batch = DataProto.from_dict(columns)
    side = trainer(
        config_of(*settings),
        learner=SimpleNamespace(version=0, learn=learn),
        buffer=SimpleNamespace(take=lambda *_: ([0, 1], batch)),
        comparisons=SimpleNamespace(in_step=True),
        model_cost=ModelCost(2.0, 3.0, ((4.0, None),)),
        start=lambda: None,
        push=lambda: None,
        pending=None,
        pushing=threading.Lock(),
    )
    with pytest.raises(Seen) as seen:
        side.fit(total_steps=1)
    (learned,) = seen.value.args
    expected = columns["rollout_log_probs" if bypass else "old_log_probs"]
    assert torch.equal(learned.batch["old_log_probs"], expected)
