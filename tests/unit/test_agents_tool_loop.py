"""Episodes of a class in a real host process: its tools, its rewards, and what goes wrong."""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from agent_endpoints import CHATML, SAMPLING, ScriptedModel, make_chat, make_tokenizer
from optional_packages import needs_vllm

from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.episode import Episode, EpisodeSpec
from verl_like.workers.agents.hosts import HostedCode, Hosts, describe_environment
from verl_like.workers.agents.runner import EpisodeRunner
from verl_like.workers.agents.session import Limits
from verl_like.workers.agents.tool_loop import EnvironmentClass, ToolLoop
from verl_like.workers.config.agent import AgentConfig
from verl_like.workers.rollout.request import Completion, GenerationRequest

pytestmark = needs_vllm

ENVIRONMENT = '''
import time

class Counter:
    """Counts what is added, from where the row says."""

    def reset(self, mode, start=0, **row):
        self.mode = mode
        self.total = start
        self.columns = sorted(row)
        if mode == "reset raises":
            raise OSError("no database")
        if mode == "text":
            return f" Begin at {start}."
        return 7 if mode == "number" else None

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: how much
        """
        if number == 13:
            raise ValueError("unlucky")
        if self.mode == "slow":
            time.sleep(30)
        self.total += number
        return self.total

    async def say(self, word: str) -> tuple:
        """Says a word.

        Args:
            word: the word
        """
        return (word, 1)

    def get_reward(self):
        rewards = {"none": None, "nan": float("nan"), "many": [0.5, 0.25], "text": self.total}
        if self.mode == "reward raises":
            raise KeyError("lost")
        return rewards.get(self.mode, self.total / 4)
'''
END = "<|im_end|>"
LIMITS = Limits(first_prompt=1500, response=900, context=3000, call_timeout_s=30.0)


@functools.cache
def chat() -> ChatFormat:
    """Made once, and not when tests are collected, since it imports vLLM."""
    return make_chat(make_tokenizer())


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>{END}'


ADD = call("add", '{"number": 3}')
TURNS = {
    "two": [ADD, f"Done.{END}"],
    "one": [f"Done.{END}"],
    "two calls": [call("add", '{"number": 3}')[: -len(END)] + call("say", '{"word": "hi"}'), END],
    "bad": [
        call("add", '{"number": 13}'),
        call("add", '{"amount": 1}'),
        call("subtract", '{"number": 1}'),
        call("add", "[3]"),
        '<tool_call>\n{"name": "add", "arg' + END,
    ],
    "endless": [ADD] * 100,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("environment")
    (folder / "counting.py").write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield describe_environment("counting:Counter", 4.0)


@pytest.fixture(scope="module")
def play(environment: Any) -> Any:
    """Plays episodes on one host process, whose model writes given turns."""
    made = []

    def played(
        turns: Sequence[str],
        mode: str = "",
        limits: Limits = LIMITS,
        max_turns: int | None = None,
        **settings: Any,
    ) -> tuple[Episode, ScriptedModel]:
        model = ScriptedModel(lambda _: chat().tokens(turns[len(model.requests) - 1]))
        settings |= {"num_attempts": 2, "max_episodes": 4, "episode_timeout_s": 60.0}
        config = AgentConfig(environment="counting:Counter", **settings)
        loop = ToolLoop(
            chat(), environment.tools, has_reward=True, max_turns=max_turns, config=config
        )
        hosts = Hosts(HostedCode("environment", "counting:Counter"), 1, 4.0)
        runner = EpisodeRunner(EnvironmentClass(hosts, loop), limits, config)
        made.append(runner)
        messages = [{"role": "user", "content": "Count."}]
        prompt = chat().render(messages, environment.tools, is_prompt=True)
        sampling = replace(SAMPLING, stop_token_ids=(chat().tokenizer.eos_token_id,))
        request = GenerationRequest("an episode", chat().tokens(prompt), 5, sampling)
        row = {"prompt": messages, "mode": mode, "start": 2, "data_source": "counts"}
        runner.begin([EpisodeSpec(request, row)])
        answers: dict[str, Completion] = {}
        while True:
            news = runner.exchange(answers, 30.0)
            answers = {}
            for each in news.requests:
                answers[each.name] = asyncio.run(model.complete(each))
            if news.episodes:
                (episode,) = news.episodes
                return episode, model

    yield played
    for runner in made:
        runner.close()


def text_of(episode: Episode, drawn: bool | None = None) -> str:
    (row,) = episode.rows
    tokens = row.response_ids
    if drawn is not None:
        tokens = tokens[row.response_mask == int(drawn)]
    return chat().tokenizer.decode(tokens)


def test_tools_are_called_and_their_results_are_inserted(play):
    episode, model = play(TURNS["two"])
    assert text_of(episode) == (
        f"{ADD}\n<|im_start|>tool\n5{END}\n<|im_start|>assistant\nDone.{END}"
    )
    assert text_of(episode, drawn=True) == f"{ADD}Done.{END}"
    (row,) = episode.rows
    assert chat().tokenizer.decode(row.prompt_ids) == chat().tokenizer.decode(
        model.requests[0].prompt_ids
    )
    assert row.scores.tolist() == [0.0] * (len(row.scores) - 1) + [1.25]
    assert episode.ended == "done" and episode.counts["tool_calls"] == 1
    first, last = episode.turns
    (used,) = first.tool_calls
    assert (used.name, used.arguments, used.result) == ("add", "{'number': 3}", "5")
    assert not used.is_error and not last.tool_calls


def test_several_calls_of_a_turn_are_made_in_order_and_results_are_texts_as_in_trl(play):
    episode, _model = play(TURNS["two calls"], "many")
    inserted = text_of(episode, drawn=False)
    assert f"tool\n5{END}\n<|im_start|>tool\n('hi', 1){END}" in inserted
    (row,) = episode.rows
    assert row.scores[row.scores != 0].tolist() == [0.5, 0.25], "a reward for each call"


def test_text_of_reset_stands_behind_the_last_message(play):
    episode, model = play(TURNS["two"], "text")
    prompt = chat().tokenizer.decode(model.requests[0].prompt_ids)
    assert f"user\nCount. Begin at 2.{END}" in prompt
    assert episode.rows[0].scores.sum() == 5


def test_what_the_policy_does_wrong_is_told_to_it_and_trained(play):
    episode, model = play(TURNS["bad"])
    assert episode.ended == "done" and len(model.requests) == 5
    inserted = text_of(episode, drawn=False)
    assert "{'error': 'ValueError: unlucky'}" in inserted
    assert "got an unexpected keyword argument 'amount'" in inserted
    assert "{'error': 'Tool subtract not found.'}" in inserted
    assert "{'error': 'The arguments of add are no JSON object.'}" in inserted
    counts = episode.counts
    assert (counts["tool_errors/add"], counts["unknown_tools"]) == (2, 1)
    assert counts["unreadable_calls"] == 2, "arguments that are a list, and JSON that is cut off"
    assert episode.has_reward and not episode.failures
    assert [each.is_error for turn in episode.turns for each in turn.tool_calls] == [True] * 4


def test_turns_and_room_end_an_episode_that_is_trained(play):
    episode, model = play(TURNS["endless"], max_turns=3)
    assert (episode.ended, len(model.requests)) == ("turns", 3)
    assert episode.counts["turns_used_up"] == 1 and episode.counts["tool_calls"] == 2
    limits = replace(LIMITS, response=120)
    episode, model = play(TURNS["endless"], limits=limits)
    assert episode.ended == "room" and episode.counts["room_used_up"] == 1
    assert 1 < len(model.requests) < 9 and len(episode.rows[0].response_ids) <= 120
    assert episode.has_reward


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("reset raises", "reset raised OSError: no database"),
        ("number", "reset returned 7: return None, or text"),
        ("reward raises", "get_reward raised KeyError: 'lost'"),
    ],
)
def test_what_the_environment_does_wrong_is_tried_again_and_never_a_reward(play, mode, text):
    episode, _model = play(TURNS["one"] * 2, mode)
    assert episode.ended == "failed" and not episode.rows
    kinds = [kind for kind, _text in episode.failures]
    assert kinds == ["environment", "environment"]
    assert text in episode.failures[0][1]


def test_a_tool_that_takes_too_long_fails_the_attempt(play):
    episode, model = play([ADD, ADD], "slow", tool_timeout_s=0.5)
    assert episode.ended == "failed" and len(model.requests) == 2
    assert [kind for kind, _text in episode.failures] == ["deadline", "deadline"]
    assert "did not end add within 0.5 s" in episode.failures[0][1]


def test_a_prompt_without_room_is_no_failure_of_the_policy(play):
    episode, model = play(TURNS["one"], limits=replace(LIMITS, first_prompt=20))
    assert episode.ended == "failed" and not model.requests
    assert "max_prompt_length=20" in episode.failures[0][1]


@pytest.mark.parametrize(
    ("mode", "has_reward", "problem"),
    [("none", False, ""), ("nan", False, "nan is no finite number"), ("many", False, "2 rewards")],
)
def test_a_reward_of_none_is_left_out_and_what_is_none_is_said(play, mode, has_reward, problem):
    episode, _model = play(TURNS["one"], mode)
    assert episode.ended == "done" and episode.has_reward == has_reward
    assert episode.reward_problem.startswith(problem) or problem in episode.reward_problem
    assert bool(episode.reward_problem) == bool(problem)


def test_a_parser_that_raises_reads_no_call(play, monkeypatch):
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise IndexError("a parser's own fault")

    monkeypatch.setattr(chat().parser_class, "parse", fail)
    episode, model = play(TURNS["two"])
    assert episode.ended == "done" and len(model.requests) == 1
    assert episode.counts["unreadable_calls"] == 1


def test_calls_that_the_template_refuses_end_an_episode_that_is_trained(play, monkeypatch):
    """Those of Llama 3 raise an error for a second call in a turn."""
    start = "{% for c in m.tool_calls or [] %}"
    check = "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('single') }}{% endif %}"
    monkeypatch.setattr(chat().tokenizer, "chat_template", CHATML.replace(start, check + start))
    episode, model = play([ADD, *TURNS["two calls"]])
    assert (episode.ended, episode.failures, len(model.requests)) == ("done", (), 2)
    assert episode.counts["unreadable_calls"] == 1 and episode.counts["tool_calls"] == 1
    (row,) = episode.rows
    assert row.scores.sum() == 1.25


def test_half_a_surrogate_pair_in_the_name_of_a_tool_is_a_question_mark(play, monkeypatch):
    named = CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ m.name or '' }}\n")
    monkeypatch.setattr(chat().tokenizer, "chat_template", named)
    episode, _model = play([call("\\ud800", "{}"), f"Done.{END}"])
    assert episode.ended == "done" and episode.counts["unknown_tools"] == 1
    assert "tool ?\n{'error': 'Tool \\ud800 not found.'}" in text_of(episode, drawn=False)


def test_the_class_is_described_as_trl_does(environment):
    assert environment.has_reward
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "say"]
