"""Calls of the model in an episode: rows by hand, seeds, limits, and rewards."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_like.algorithms.advantages.gae import compute_gae_advantage_return
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.workers.agents.batch import EpisodeRules, assemble_episodes
from verl_like.workers.agents.episode import (
    Episode,
    EpisodeFailed,
    EpisodeSpec,
    RewardProblem,
    RoomUsedUp,
)
from verl_like.workers.agents.session import Drawn, Limits, Session
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling

EOS = 9
SAMPLING = Sampling(temperature=0.7, top_k=-1, top_p=1.0, max_tokens=12, stop_token_ids=(EOS,))
LIMITS = Limits(first_prompt=4, response=12, context=16, call_timeout_s=5.0)


class ScriptedModel:
    """A test's stand-in for the engines: it answers with given tokens and keeps the requests."""

    def __init__(self, *answers: Sequence[int]) -> None:
        self.answers = list(answers)
        self.requests: list[GenerationRequest] = []
        self.version = 3

    async def complete(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        token_ids = list(self.answers.pop(0))
        await asyncio.sleep(0)
        log_probs = [-token / 10 for token in token_ids]
        return Completion(token_ids, log_probs, ((self.version, 0, len(token_ids)),))


def session_of(model, limits=LIMITS) -> Session:
    request = GenerationRequest("row 0, sample 1", [1, 2], seed=77, sampling=SAMPLING, uid="0-0")
    spec = EpisodeSpec(request, {"prompt": []})
    return Session(spec, model, limits, name="an attempt")


def draw(session: Session, prompt_ids: Sequence[int], **options) -> Drawn:
    return asyncio.run(session.draw(prompt_ids, **options))


def test_a_call_that_continues_the_tokens_of_a_row_extends_it_and_another_begins_one():
    model = ScriptedModel([5, EOS], [6, 7, EOS], [8, EOS])
    session = session_of(model)
    draw(session, [1, 2])
    model.version = 4
    draw(session, [1, 2, 5, EOS, 3, 3])
    draw(session, [1, 2, 5, EOS, 3])  # the row has other tokens there by now
    first, second = session.finish(0.5)
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.response_ids.tolist() == [5, EOS, 3, 3, 6, 7, EOS]
    assert first.response_mask.tolist() == [1, 1, 0, 0, 1, 1, 1]
    assert first.log_probs.tolist() == pytest.approx([-0.5, -0.9, 0, 0, -0.6, -0.7, -0.9])
    assert first.versions == ((3, 0, 2), (4, 4, 7)), "inserted tokens are of no version"
    assert first.scores.tolist() == [0] * 7
    assert second.prompt_ids.tolist() == [1, 2, 5, EOS, 3]
    assert second.response_ids.tolist() == [8, EOS]
    assert second.scores.tolist() == [0, 0.5], "the reward stands on the last call's last token"
    assert session.counts["rows"] == 2 and session.counts["joined_calls"] == 1
    assert [turn.row for turn in session.turns.values()] == [0, 0, 1]


class RoutedModel(ScriptedModel):
    """Each token of a call's prompt and response was computed by the expert of the call's number, in
    the second layer by the one after it."""

    async def complete(self, request: GenerationRequest) -> Completion:
        completion = await super().complete(request)
        num_tokens = len(request.prompt_ids) + len(completion.token_ids)
        ids = np.full((num_tokens, 2, 1), len(self.requests), np.int8)
        ids[:, 1] += 1
        ids[-1] = -1
        return replace(completion, routed_experts=ids)


def test_a_row_has_the_routing_of_the_call_that_drew_what_follows_each_token():
    session = session_of(RoutedModel([5, EOS], [6, 7, EOS], [8, 8, EOS]))
    draw(session, [1, 2])
    draw(session, [1, 2, 5, EOS, 3, 3])
    draw(session, [4], find_stop=lambda token_ids, has_ended: (2, "8"))
    first, second = session.finish(0.5)
    assert first.routed_experts is not None and second.routed_experts is not None
    assert first.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, -1]
    assert first.routed_experts[:, 1, 0].tolist() == [2, 2, 2, 3, 3, 3, 3, 3, -1]
    assert second.routed_experts[:, 0, 0].tolist() == [3, 3, -1], "the text ended with a token"
    assert second.response_ids.tolist() == [8, 8]
    episodes = [
        Episode("done", (first, second), True, "done"),
        Episode("failed", (), False, "failed", failures=(("engine", "none answers"),)),
    ]
    prompts = DataProto.from_dict(tensors={"prompts": jagged_from_lists([[1, 2]], torch.int64)})
    rules = EpisodeRules(min_samples=1, num_of_step=4, on_error="skip", filler_token=0)
    column = assemble_episodes(prompts, episodes, rules).batch["routed_experts"]
    assert [len(column[row]) for row in range(3)] == [9, 3, 3]
    assert column[0][:, 1, 0].tolist() == [2, 2, 2, 3, 3, 3, 3, 3, -1]
    assert (column[2] == -1).all() and column[2].dtype == torch.int8
    prompts.meta_info["validate"] = True
    assert "routed_experts" not in assemble_episodes(prompts, episodes, rules).batch


def test_of_two_parallel_calls_that_continue_a_row_the_first_extends_it():
    model = ScriptedModel([5], [6, 6, EOS], [7, EOS])
    session = session_of(model)

    async def both() -> None:
        await session.draw([1, 2])
        await asyncio.gather(session.draw([1, 2, 5, 4]), session.draw([1, 2, 5, 3, 3]))

    asyncio.run(both())
    first, second = session.finish([0.1, 0.2, 0.3])
    assert first.response_ids.tolist() == [5, 4, 6, 6, EOS]
    assert first.scores.tolist() == pytest.approx([0.1, 0, 0, 0, 0.2])
    assert second.prompt_ids.tolist() == [1, 2, 5, 3, 3]
    assert second.scores.tolist() == pytest.approx([0, 0.3])


def test_rows_stand_in_the_order_of_their_last_calls_so_that_no_token_is_behind_the_reward():
    """With a critic the reward of the answer reaches the tokens of a sub-agent that was asked."""
    session = session_of(ScriptedModel([5, EOS], [8], [6, EOS]))
    draw(session, [1, 2])
    draw(session, [3])
    draw(session, [1, 2, 5, EOS, 4])
    of_sub_agent, row = session.finish(2.0)
    assert of_sub_agent.response_ids.tolist() == [8]
    assert row.response_ids.tolist() == [5, EOS, 4, 6, EOS]
    assert [turn.row for turn in session.turns.values()] == [1, 0, 1]
    rewards = torch.from_numpy(np.concatenate([of_sub_agent.scores, row.scores]))
    mask = torch.from_numpy(np.concatenate([of_sub_agent.response_mask, row.response_mask]))
    _advantages, returns = compute_gae_advantage_return(
        rewards[None], torch.zeros(1, 6), mask[None], gamma=1.0, lam=1.0
    )
    assert returns[mask[None].bool()].tolist() == [2.0] * 5


def test_the_first_call_has_the_seed_of_the_response_and_later_ones_that_of_their_prompt():
    def seeds(*prompts: list[int]) -> list[int]:
        model = ScriptedModel(*[[EOS]] * len(prompts))
        session = session_of(model)
        for prompt_ids in prompts:
            draw(session, prompt_ids)
        return [request.seed for request in model.requests]

    first, second, third, again = seeds([1, 2], [3], [4, 4], [3])
    assert first == 77
    assert len({first, second, third, again}) == 4, "the same prompt gets another seed again"
    assert seeds([1, 2], [4, 4], [3], [3]) == [first, third, second, again], "in any order"


def test_a_call_has_as_many_tokens_as_its_row_its_context_and_the_caller_leave():
    model = ScriptedModel([5] * 5, [6] * 3, [7] * 2)
    session = session_of(model)
    draw(session, [1, 2], max_tokens=5)
    draw(session, [1, 2, 5, 5, 5, 5, 5, 4, 4])
    draw(session, [8] * 14)
    asked = [request.sampling.max_tokens for request in model.requests]
    assert asked == [5, 12 - 7, 16 - 14]
    with pytest.raises(RoomUsedUp, match=r"16 tokens, of which 0 are behind .* context of 16"):
        draw(session, [8] * 16)
    assert len(model.requests) == 3
    with pytest.raises(RoomUsedUp, match=r"first prompt has 5 tokens.*max_prompt_length=4"):
        draw(session_of(model), [1] * 5)
    with pytest.raises(RoomUsedUp, match="first prompt has 0 tokens"):
        draw(session_of(model), [])


def find_34(token_ids: list[int], is_ended: bool) -> tuple[int, str | None]:
    """Each token is a digit. The text that ends a response is "34"."""
    place = "".join(map(str, token_ids)).find("34")
    return (place + 2, "34") if place >= 0 else (len(token_ids), None)


def test_a_text_that_stops_a_call_ends_its_record_where_it_is_complete():
    model = ScriptedModel([5, 3, 4, 6, EOS], [5, 3, EOS])
    session = session_of(model)
    drawn = draw(session, [1, 2], find_stop=find_34, stop_token_ids=[6])
    assert drawn.stop_reason == "34" and drawn.completion.token_ids.tolist() == [5, 3, 4]
    assert drawn.completion.versions == ((3, 0, 3),)
    assert model.requests[0].sampling.stop_token_ids == (6, EOS)
    drawn = draw(session, [1, 2, 5, 3, 4, 2], find_stop=find_34)
    assert drawn.stop_reason == EOS
    (row,) = session.finish(1.0)
    assert row.response_ids.tolist() == [5, 3, 4, 2, 5, 3, EOS]


def test_a_call_that_gets_no_answer_in_time_fails_and_leaves_its_row_as_it_was():
    class SilentModel:
        async def complete(self, request: GenerationRequest) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    session = session_of(SilentModel(), replace(LIMITS, call_timeout_s=0.05))
    with pytest.raises(EpisodeFailed, match=r"a call of the model took over 0.05 s") as failed:
        draw(session, [1, 2])
    assert failed.value.kind == "deadline"
    session.model = ScriptedModel([5, EOS])
    draw(session, [1, 2])
    (row,) = session.finish(2.5)
    assert row.response_ids.tolist() == [5, EOS] and row.scores.tolist() == [0, 2.5]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "nan is no finite number"),
        (float("inf"), "inf is no finite number"),
        (1e300, r"1e\+300 is no finite number of 32 bits"),
        (-(10**400), "-1000.* is no finite number"),
        ("1", "'1' is no finite number"),
        ([1.0], r"1 rewards were given for 2 calls"),
        ([1.0, None], "None.* is no finite number"),
    ],
)
def test_what_is_no_reward_is_refused(reward, message):
    model = ScriptedModel([5, EOS], [6, EOS])
    session = session_of(model)
    draw(session, [1, 2])
    draw(session, [1, 2, 5, EOS, 3])
    with pytest.raises(RewardProblem, match=message):
        session.finish(reward)
