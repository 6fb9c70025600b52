"""Episodes of several rows in a whole training step: their rows and their advantages."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agents_by_hand import AgentsByHand
from test_local_step import local_trainer

from verl_like.trainer.ppo.experience_maker import Experience
from verl_like.trainer.ppo.learner import Update
from verl_like.workers.agents.episode import EpisodeFailed
from verl_like.workers.agents.hosts import Description
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session

SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "data.max_response_length=16",
    "agent.environment=by:Hand",
    "worker_classes.agent=test_agent_training.SeveralRows",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
]
TASK_OF_SUB_AGENT = [30, 31]
SUMMARY = [20, 21, 22]
INSERTED = [40, 41]

Part = tuple[list[int], int]
"""Tokens, and the mask that each has."""


async def draw(session: Session, prompt_ids: list[int]) -> list[int]:
    """Returns what a call of the model has drawn, at most 3 tokens."""
    drawn = await session.draw(prompt_ids, max_tokens=3)
    return drawn.completion.token_ids.tolist()


async def one_call(session: Session, prompt: list[int]) -> tuple[list[list[Part]], Outcome]:
    first = await draw(session, prompt)
    return [[(prompt, 0), (first, 1)]], Outcome(1.0)


async def two_turns(session: Session, prompt: list[int]) -> tuple[list[list[Part]], Outcome]:
    first = await draw(session, prompt)
    second = await draw(session, prompt + first + INSERTED)
    row = [(prompt, 0), (first, 1), (INSERTED, 0), (second, 1)]
    return [row], Outcome([0.5, 0.25])


async def sub_agent(session: Session, prompt: list[int]) -> tuple[list[list[Part]], Outcome]:
    first = await draw(session, prompt)
    of_sub_agent = await draw(session, TASK_OF_SUB_AGENT)
    second = await draw(session, prompt + first + INSERTED)
    row = [(prompt, 0), (first, 1), (INSERTED, 0), (second, 1)]
    # In the order of their last calls.
    return [[(TASK_OF_SUB_AGENT, 0), (of_sub_agent, 1)], row], Outcome(0.0)


async def compaction_and_parallel_calls(
    session: Session, prompt: list[int]
) -> tuple[list[list[Part]], Outcome]:
    first = await draw(session, prompt)
    second = await draw(session, SUMMARY)
    longer = SUMMARY + second + INSERTED
    third, fourth = await asyncio.gather(draw(session, longer), draw(session, longer))
    assert third != fourth, "they have different seeds"
    rows: list[list[Part]] = [
        [(prompt, 0), (first, 1)],
        [(SUMMARY, 0), (second, 1), (INSERTED, 0), (third, 1)],
        [(longer, 0), (fourth, 1)],
    ]
    return rows, Outcome(2.0)


ACTS = [one_call, two_turns, sub_agent, compaction_and_parallel_calls]
REWARDS = torch.tensor([1.0, 0.75, 0.0, 2.0])
"""Of these episodes."""
written: dict[tuple[str, int], list[list[Part]]] = {}
"""The rows of each episode, as the agent knows them, by its prompt and its number."""


class SeveralRows(AgentsByHand):
    @staticmethod
    async def act(session: Session) -> Outcome:
        request = session.spec.request
        rows, outcome = await ACTS[request.index](session, list(request.prompt_ids))
        written[request.uid, request.index] = rows
        return outcome


class EverySecondFails(AgentsByHand):
    @staticmethod
    async def act(session: Session) -> Outcome:
        request = session.spec.request
        if request.index == 1:
            raise EpisodeFailed("environment", "the database is down")
        await draw(session, list(request.prompt_ids))
        return Outcome(0.75)


def test_in_a_validation_episodes_that_failed_are_counted_apart_and_in_no_mean(
    tmp_path: Path, tiny_llama: Callable
):
    own = ["worker_classes.agent=test_agent_training.EverySecondFails"]
    own += [f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in ("n=3", "temperature=1")]
    own += ["agent.num_attempts=1"]
    agents = Description(tools=[], has_reward=True)
    with local_trainer(
        tmp_path, tiny_llama, *SETTINGS, *own, agents=agents, with_rules=False
    ) as trainer:
        found = trainer.validate()
    assert found["val-aux/agent/num_failed"] == 8
    assert found["val-aux/agent/num_episodes"] == 2 * 8
    assert found["val-core/exact_match/reward/mean@3"] == 0.75


def test_sub_agents_compaction_and_parallel_calls_are_rows_that_share_an_advantage(
    tmp_path: Path, tiny_llama: Callable
):
    learnt: list[Experience] = []
    written.clear()
    options = {"agents": Description(tools=[], has_reward=True), "with_rules": False, "steps": 1}
    with local_trainer(tmp_path, tiny_llama, *SETTINGS, **options) as trainer:
        learn = trainer.learner.learn

        def note_and_learn(experience: Experience) -> Update:
            learnt.append(experience)
            return learn(experience)

        trainer.learner.learn = note_and_learn
        trainer.fit()
    batch = learnt[0].batch
    columns = {
        name: [row.tolist() for row in batch.batch[name].unbind()]
        for name in ("prompts", "responses", "response_mask", "advantages")
    }
    samples = batch.batch["sample_id"].tolist()
    uids = batch.non_tensor_batch["uid"].tolist()
    names = dict(zip(samples, uids, strict=True))
    assert len(written) == len(names) == 16
    of_group = (REWARDS - REWARDS.mean()) / (REWARDS.std() + 1e-6)
    number = 0
    for sample, uid in names.items():
        index = sample % 4
        for parts in written[uid, index]:
            prompt, _ = parts[0]
            assert columns["prompts"][number] == prompt
            assert columns["responses"][number] == [t for tokens, _ in parts[1:] for t in tokens]
            mask = [is_drawn for tokens, is_drawn in parts[1:] for _ in tokens]
            assert columns["response_mask"][number] == mask
            assert samples[number] == sample
            expected = [of_group[index].item() * is_drawn for is_drawn in mask]
            assert columns["advantages"][number] == pytest.approx(expected, abs=1e-5)
            number += 1
    assert number == len(samples) == 28
