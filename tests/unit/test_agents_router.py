"""Episodes on real replicas in this process: their requests, their batch, and their failures."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from agents_by_hand import Act, AgentsByHand
from test_rollout_router import N, actor, assert_same_rows, config, make_group, prompts  # noqa: F401  fixtures

from verl_like.protocol import DataProto
from verl_like.rewards.manager import RewardError
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import CallEvent, ClassWithInitArgs
from verl_like.trainer.ppo.workers import load_models
from verl_like.workers.agents.episode import (
    AgentsFailed,
    Episode,
    EpisodeFailed,
    Restarted,
    RoomUsedUp,
)
from verl_like.workers.agents.hosts import Description
from verl_like.workers.agents.router import EpisodeRouter, connect_agents
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session
from verl_like.workers.config.agent import AgentConfig


def rows(num_rows: int, step: int = 1, **meta_info: Any) -> DataProto:
    batch = prompts(num_rows, step, **meta_info)
    columns = batch.non_tensor_batch
    for name in ("data_source", "reward_model", "extra_info", "raw_prompt"):
        values = [f"{name} {row}" for row in range(num_rows)]
        if name == "extra_info":
            values = [{"answer": row, "data_source": "hidden"} for row in range(num_rows)]
        columns[name] = np.array(values, dtype=object)
    return batch


@pytest.fixture
def make_agents(make_group, config):  # noqa: F811
    """Connects agents that act by hand with two replicas."""
    groups = []

    def make(act: Act, routing: str = "least_loaded", num_ranks: int = 2, **settings: Any):
        rollout = make_group(routing)
        rules = {"min_samples": settings.pop("min_samples", 2)}
        rules["on_error"] = settings.pop("on_error", "fail")
        rules["num_of_step"] = settings.pop("num_of_step", 7)
        init = ClassWithInitArgs(
            type("Agents", (AgentsByHand,), {"act": staticmethod(act)}),
            config=AgentConfig(environment="by:Hand", **settings),
            policy=config,
            rules=rules,
            template_kwargs={},
            agents=Description(tools=[], has_reward=True),
        )
        agents = LocalWorkerGroup(init, num_ranks, role="agent")
        agents.init_model()
        seen: list[Episode] = []
        connect_agents(agents, rollout, lambda _prompts, episodes: seen.extend(episodes))
        groups.append(agents)
        return agents, rollout, seen

    yield make
    for group in groups:
        group.shutdown()


async def one_call(session: Session) -> Outcome:
    await session.draw(session.spec.request.prompt_ids)
    return Outcome(0.25)


@pytest.mark.parametrize("routing", ["fixed", "least_loaded"])
@pytest.mark.parametrize("meta_info", [{}, {"validate": True}])
def test_episodes_of_one_call_have_the_tokens_of_responses(make_agents, routing, meta_info):
    agents, rollout, seen = make_agents(one_call, routing)
    batch = rows(5, **meta_info)
    made = agents.run_episodes(batch).get()
    responses = rollout.generate_sequences(batch).get()
    assert isinstance(rollout.caller, EpisodeRouter), "one router serves both"
    assert_same_rows(made.select(batch_keys=list(responses.tensors())), responses)
    scores = [row.tolist() for row in made.batch["episode_scores"].unbind()]
    assert all(row[-1] == 0.25 and not any(row[:-1]) for row in scores)
    assert made.batch["sample_id"].tolist() == list(range(len(responses)))
    assert not made.batch["is_skipped"].any() and not made.batch["is_failed"].any()
    assert [episode.ended for episode in seen] == ["done"] * len(responses)


def test_with_fixed_routing_each_replica_has_the_episodes_of_its_prompts(make_agents, monkeypatch):
    agents, rollout, _seen = make_agents(one_call, "fixed")
    queue = rollout.caller.queue
    place = queue.place
    asked = []

    def keep(request: Any, replica: int | None) -> int:
        asked.append(replica)
        return place(request, replica)

    monkeypatch.setattr(queue, "place", keep)
    agents.run_episodes(rows(5)).get()
    assert Counter(asked) == {0: 3 * N, 1: 2 * N}


def test_all_calls_of_an_episode_go_to_one_replica_and_new_weights_show_in_its_spans(
    make_agents,
    actor,  # noqa: F811
):
    taken = defaultdict(set)
    goes_on = asyncio.Event()

    async def two_calls(session: Session) -> Outcome:
        await session.draw(session.spec.request.prompt_ids, max_tokens=3)
        await goes_on.wait()
        await session.draw([*session.rows[0].token_ids, 2], max_tokens=2)
        return Outcome([1.0, -2.0])

    agents, rollout, _seen = make_agents(two_calls, num_ranks=1)
    router = rollout.caller
    place = router.queue.place

    def placed(request, replica):
        found = place(request, replica)
        taken[request.episode].add(found)
        return found

    router.queue.place = placed
    pending = agents.run_episodes.remote(rows(4))
    while len(router.queue) or not taken:
        pass
    rollout.load_weights(actor.export_weights(version=4), version=4)
    runner = agents.workers[0].runner
    runner._loop.call_soon_threadsafe(goes_on.set)
    made = pending.get()
    assert {len(replicas) for replicas in taken.values()} == {1}
    assert set().union(*taken.values()) == {0, 1}
    assert len(made) == 4 * N
    for row, spans in enumerate(made.non_tensor_batch["policy_version"]):
        mask = made.batch["response_mask"].unbind()[row]
        (gap,) = (mask == 0).nonzero().flatten().tolist()
        assert spans == ((3, 0, gap), (4, gap + 1, len(mask)))
        score = made.batch["episode_scores"].unbind()[row]
        assert score[gap - 1] == 1 and score[-1] == -2


def test_calls_of_one_prompt_are_divided_among_the_ranks(make_agents):
    """As in detached training with responses in flight."""
    ranks = []

    async def note_rank(session: Session) -> Outcome:
        ranks.append(router.running[session.spec.request.name].rank)
        return await one_call(session)

    agents, rollout, _seen = make_agents(note_rank)
    router = rollout.caller
    pending = [agents.run_episodes.remote(rows(1, step)) for step in (1, 2, 3, 4)]
    for responses in pending:
        responses.get()
    assert sorted(ranks) == [0] * 2 * N + [1] * 2 * N


def test_what_failed_is_tried_again_and_healthy_siblings_are_kept(make_agents):
    attempts: defaultdict[str, int] = defaultdict(int)

    async def some_fail(session: Session) -> Outcome:
        request = session.spec.request
        attempts[request.name] += 1
        await session.draw(request.prompt_ids)
        number = attempts[request.name]
        if request.uid == "1-0" and request.index == 1:
            raise EpisodeFailed("environment", "always")
        if request.uid == "1-1" and number < 3:
            raise Restarted if number == 1 else EpisodeFailed("harness", "once")
        if request.uid == "1-2" and request.index < 2:
            raise EpisodeFailed("deadline", "late")
        return Outcome(float(request.index))

    agents, _rollout, seen = make_agents(some_fail, num_attempts=2)
    made = agents.run_episodes(rows(4)).get()
    by_name = {episode.name: episode for episode in seen}
    assert len(by_name) == 4 * N
    failed = made.batch["is_failed"].view(4, N).tolist()
    assert failed == [
        [False, True, False],
        [False, False, False],
        [True, True, True],  # one of three is left, and a group needs two
        [False, False, False],
    ]
    assert made.batch["is_skipped"].view(4, N).tolist() == failed
    masks = [row.sum().item() for row in made.batch["response_mask"].unbind()]
    assert [not tokens for tokens in masks] == [each for group in failed for each in group]
    metrics = {name: metric.value for name, metric in made.meta_info["metrics"].items()}
    assert metrics["agent/num_dropped_prompts"] == 1
    assert metrics["agent/num_failed"] == 3
    assert metrics["agent/num_failures/environment"] == 2
    assert metrics["agent/num_failures/harness"] == 3
    assert metrics["agent/num_failures/deadline"] == 4
    assert metrics["agent/calls/mean"] == 1
    assert max(attempts.values()) == 3, "a restart counts as no attempt"


def test_a_run_ends_once_as_many_episodes_as_a_step_has_failed_one_after_the_other(make_agents):
    async def act(session: Session) -> Outcome:
        name = session.spec.request.name
        if not name.endswith("sample 1 of call 2"):
            raise EpisodeFailed("environment", f"no server for {name}")
        return await one_call(session)

    agents, _rollout, seen = make_agents(act, num_attempts=2, num_of_step=2 * N)
    for _ in range(3):  # in the second call one episode does not fail, and the count begins again
        assert len(agents.run_episodes(rows(1)).get()) == N
    with pytest.raises(
        AgentsFailed, match=r"last 6 episodes failed.*environment.*server for row 0.* of call 4"
    ):
        agents.run_episodes(rows(1)).get()
    assert len(seen) == 4 * N, "people see them before"


def test_a_validation_drops_no_group(make_agents):
    async def first_fails(session: Session) -> Outcome:
        if session.spec.request.index == 0:
            raise EpisodeFailed("environment", "the first")
        return await one_call(session)

    agents, _rollout, _seen = make_agents(first_fails)
    made = agents.run_episodes(rows(2, validate=True)).get()
    assert made.batch["is_failed"].tolist() == [True, False, True, False]
    assert made.meta_info["metrics"]["agent/num_dropped_prompts"].value == 0


@pytest.mark.parametrize(
    ("on_error", "skipped", "score"), [("skip", True, 0.0), ("score", False, 0.0)]
)
def test_a_reward_that_is_none_or_no_number_does_what_the_configuration_says(
    make_agents, on_error, skipped, score
):
    async def act(session: Session) -> Outcome:
        await session.draw(session.spec.request.prompt_ids)
        return Outcome([None, float("nan"), 2.0][session.spec.request.index])

    agents, _rollout, _seen = make_agents(act, on_error=on_error)
    made = agents.run_episodes(rows(1)).get()
    assert made.batch["is_skipped"].tolist() == [True, skipped, False]
    assert not made.batch["is_failed"].any()
    totals = [row.sum().item() for row in made.batch["episode_scores"].unbind()]
    assert totals == [0.0, score, 2.0]
    assert made.meta_info["metrics"]["reward/num_errors"].value == 1


def test_a_reward_that_is_no_number_ends_the_run_unless_it_is_skipped(make_agents):
    async def act(session: Session) -> Outcome:
        await session.draw(session.spec.request.prompt_ids)
        return Outcome(float("nan"))

    agents, _rollout, _seen = make_agents(act)
    with pytest.raises(RewardError, match=r"row 0 .*nan is no finite number.*\n.*reward.on_error"):
        agents.run_episodes(rows(1)).get()


def test_an_error_of_the_library_ends_the_call_and_a_cancelled_request_is_aborted(make_agents):
    async def act(session: Session) -> Outcome:
        request = session.spec.request
        if request.index == 1:
            call = asyncio.create_task(session.draw(request.prompt_ids))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return Outcome(0.0)
        if request.uid == "2-1":
            raise AssertionError("our own fault")
        return await one_call(session)

    agents, rollout, _seen = make_agents(act)
    made = agents.run_episodes(rows(3)).get()
    masks = [row.sum().item() for row in made.batch["response_mask"].unbind()]
    assert [bool(tokens) for tokens in masks] == [True, False, True] * 3
    router = rollout.caller
    assert not router.queue and not router.episode_of_request and not router.running
    with pytest.raises(WorkerError, match="our own fault"):
        agents.run_episodes(rows(2, step=2)).get()


def test_an_episode_without_room_says_so_and_is_trained(make_agents):
    async def act(session: Session) -> Outcome:
        prompt_ids = list(session.spec.request.prompt_ids)
        while True:
            try:
                await session.draw(prompt_ids, max_tokens=3)
            except RoomUsedUp:
                return Outcome(0.5, "room")
            prompt_ids = [*session.rows[0].token_ids, 2]

    agents, _rollout, seen = make_agents(act)
    made = agents.run_episodes(rows(2)).get()
    lengths = [len(row) for row in made.batch["responses"].unbind()]
    assert max(lengths) <= 12 and {episode.ended for episode in seen} == {"room"}
    assert torch.cat(made.batch["episode_scores"].unbind()).sum() == 0.5 * 2 * N


def test_who_loads_the_models_is_told_of_the_episodes_of_each_call_once(make_agents):
    agents, rollout, _seen = make_agents(one_call)
    told: list[tuple[Any, int]] = []

    def on_episodes(prompts: DataProto, episodes: Sequence[Episode]) -> None:
        told.append((prompts.meta_info.get("validate"), len(episodes)))

    for group in (rollout, agents):  # whose models are there already
        group.init_model = SimpleNamespace(remote=lambda: SimpleNamespace(get=list))
    load_models({"rollout": rollout, "agent": agents}, "cpu", on_episodes)
    pending = agents.run_episodes.remote(rows(2))
    validation = agents.run_episodes.remote(rows(3, validate=True))
    for _ in range(2):
        validation.get()
        pending.get()
    assert told == [(True, 3 * 2), (None, 2 * N)]


def test_the_timeline_has_a_call_once_for_each_rank_while_its_episodes_ran(make_agents):
    ran: list[list[float]] = [[], []]

    async def act(session: Session) -> Outcome:
        times = ran[router.running[session.spec.request.name].rank]
        times.append(time.time())
        outcome = await one_call(session)
        await asyncio.sleep(0.01)
        times.append(time.time())
        return outcome

    agents, rollout, seen = make_agents(act)
    router = rollout.caller
    events: list[CallEvent] = []
    agents.on_call = events.append
    agents.run_episodes(rows(2)).get()
    names = [(each.role, each.method, each.rank) for each in events]
    assert names == [("agent", "run_episodes", rank) for rank in (0, 1)]
    for each, times in zip(events, ran, strict=True):
        assert each.started <= min(times) < max(times) <= each.finished
        of_rank = [(episode.started, episode.started + episode.seconds) for episode in seen]
        assert each.started in [started for started, _ended in of_rank]
        assert each.finished in [ended for _started, ended in of_rank]


def test_a_request_of_an_episode_that_has_ended_is_not_drawn(make_agents):
    is_asked = asyncio.Event()
    late: list[asyncio.Task[None]] = []

    async def ask_late(session: Session) -> None:
        while session.spec.request.name in router.running:
            await asyncio.sleep(0.001)
        is_asked.set()  # the others go on once this one waits for its answer
        await session.draw(session.spec.request.prompt_ids)

    async def act(session: Session) -> Outcome:
        if session.spec.request.index == 0:
            late.append(asyncio.create_task(ask_late(session)))
            return Outcome(0.5)
        await is_asked.wait()
        return await one_call(session)

    agents, rollout, _seen = make_agents(act, num_ranks=1)
    router = rollout.caller
    made = agents.run_episodes(rows(1)).get()
    masks = [row.sum().item() for row in made.batch["response_mask"].unbind()]
    assert [bool(tokens) for tokens in masks] == [False, True, True]
    assert not late[0].done(), "nobody answers it"
    agents.workers[0].runner._loop.call_soon_threadsafe(late[0].cancel)
