"""The endpoint over HTTP: clients that were made for other servers, without changes, against a
model whose answers are written here."""

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from agent_endpoints import (
    LIMITS,
    THINKING,
    WEATHER,
    InProcess,
    ScriptedModel,
    Served,
    make_chat,
    make_tokenizer,
    save_model,
    split_at_random,
)
from optional_packages import needs_vllm

from verl_like.workers.agents.endpoint import IGNORED, ROUTES, SERVED, Endpoint
from verl_like.workers.agents.engine_client import Access
from verl_like.workers.agents.episode import Episode, EpisodeFailed, EpisodeSpec, RewardProblem
from verl_like.workers.agents.harness import Harness
from verl_like.workers.agents.reward_key import reward_key, set_reward_key
from verl_like.workers.agents.runner import EpisodeRunner, Outcome
from verl_like.workers.agents.session import Session
from verl_like.workers.config.agent import AgentConfig
from verl_like.workers.rollout.request import Completion, GenerationRequest

pytestmark = needs_vllm

CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "day": 2}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Rome"}}}}\n</tool_call>'
BROKEN = 'Hm <tool_call>\n{"name": "weather", "arguments": {"city": "Par}\n</tool_call>'
PLAIN = "It is sunny. "
ASK = {"role": "user", "content": "How is it in Paris?"}
RESPONSES_TOOL = {"type": "function", "strict": None, **WEATHER["function"]}
ANTHROPIC_TOOL = {
    "name": "weather",
    "description": "Weather.",
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = make_tokenizer()
    model = save_model(tmp_path_factory.mktemp("model"), tokenizer)
    served = Served(make_chat(tokenizer), model)
    yield served
    served.close()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An endpoint of a model that reasons. Tests set whether earlier reasoning is kept."""
    tokenizer = make_tokenizer(THINKING)
    model = save_model(tmp_path_factory.mktemp("thinking"), tokenizer)
    served = Served(make_chat(tokenizer, reasoning_parser="qwen3"), model)
    yield served
    served.close()


def model_that_says(served: Served, *texts: str) -> ScriptedModel:
    """It draws these texts one after the other, and the last one from then on, in tokens that are
    not those of their encoding."""
    left = list(texts)

    def script(request: GenerationRequest) -> list[int]:
        text = left.pop(0) if len(left) > 1 else left[0]
        chance = random.Random(f"{text} {len(left)}")
        return [*split_at_random(served.chat, text, chance), served.chat.tokenizer.eos_token_id]

    return ScriptedModel(script)


def episode(served: Served, *texts: str, limits=LIMITS) -> tuple[Session, Access]:
    session = served.session(model_that_says(served, *texts), limits)
    return session, served.open(session)


def openai_client(served: Served, access: Access) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=access.base_url, api_key=served.endpoint.api_key, max_retries=0, timeout=30
    )


def post(
    served: Served, access: Access, path: str, body: Any, headers: dict | None = None
) -> httpx.Response:
    root = access.base_url.removesuffix("/v1")
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    key = {"authorization": f"Bearer {served.endpoint.api_key}", "content-type": "application/json"}
    return httpx.post(
        f"{root}{path}", content=content, headers={**key, **(headers or {})}, timeout=30
    )


def chat_turns(served: Served, access: Access, num_turns: int, *, streams: bool) -> None:
    client = openai_client(served, access)
    messages: list[Any] = [ASK]
    for _ in range(num_turns):
        options: Any = {"model": "policy", "messages": messages, "tools": [WEATHER]}
        if streams:
            with client.chat.completions.stream(**options) as stream:
                reply = stream.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(**options).choices[0].message
        kept = {"role", "content", "tool_calls"}
        messages.append(reply.model_dump(exclude_none=True, include=kept))
        for call in reply.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        if not reply.tool_calls:
            messages.append({"role": "user", "content": "more"})


def response_turns(served: Served, access: Access, num_turns: int, *, streams: bool) -> None:
    client = openai_client(served, access)
    items: list[Any] = [ASK]
    for _ in range(num_turns):
        options: Any = {"model": "policy", "input": items, "tools": [RESPONSES_TOOL]}
        if streams:
            with client.responses.stream(**options) as stream:
                output = stream.get_final_response().output
        else:
            output = client.responses.create(**options).output
        items += [item.model_dump(exclude_none=True) for item in output]
        calls = [item for item in output if item.type == "function_call"]
        for call in calls:
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            items.append(result)
        if not calls:
            items.append({"role": "user", "content": "more"})


def message_turns(served: Served, access: Access, num_turns: int, *, streams: bool) -> None:
    import anthropic  # here, since it takes a second in each process that collects tests

    client = anthropic.Anthropic(
        base_url=access.base_url.removesuffix("/v1"),
        api_key=served.endpoint.api_key,
        max_retries=0,
        timeout=30,
    )
    messages: list[Any] = [ASK]
    for _ in range(num_turns):
        options: Any = {
            "model": "policy",
            "messages": messages,
            "tools": [ANTHROPIC_TOOL],
            "max_tokens": 300,
        }
        if streams:
            with client.messages.stream(**options) as stream:
                blocks = stream.get_final_message().content
        else:
            blocks = client.messages.create(**options).content
        content = [block.model_dump(exclude_none=True) for block in blocks]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in blocks if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
        ]
        messages.append({"role": "user", "content": results or "more"})


TURNS = {"chat": chat_turns, "responses": response_turns, "messages": message_turns}


def test_a_client_that_leaves_messages_to_the_server_sends_them_all(served: Served):
    """Anthropic's tool runner asks for a thread, which the server is to keep."""
    import anthropic

    session, access = episode(served, CALL, PLAIN)
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str, day: int) -> str:
        """Weather."""
        asked.append(f"{city} {day}")
        return "sunny"

    client = anthropic.Anthropic(
        base_url=access.base_url.removesuffix("/v1"),
        api_key=served.endpoint.api_key,
        max_retries=0,
        timeout=30,
    )
    messages: list[Any] = [ASK]
    runner = client.beta.messages.tool_runner(
        model="policy", messages=messages, tools=[weather], max_tokens=300
    )
    (last,) = runner.until_done().content
    assert last.type == "text" and last.text == PLAIN
    assert asked == ["Paris 2"]
    assert (session.counts["rows"], session.counts["joined_calls"]) == (1, 1)
    result = "<|im_start|>tool\nsunny<|im_end|>\n"
    behind_turn = f"\n{result}<|im_start|>assistant\n"
    assert session.rows[0].token_ids == expected_tokens(served, session, behind_turn)


def expected_tokens(served: Served, session: Session, behind_turn: str) -> list[int]:
    """The tokens of a row whose turns all have the same text behind them."""
    model: Any = session.model
    first = model.requests[0].prompt_ids
    tokens = list(first)
    for number, turn in enumerate(session.turns.values()):
        if number:
            tokens += served.chat.tokens(behind_turn)
        drawn = session.rows[0].token_ids[len(tokens) : len(tokens) + turn.num_drawn]
        tokens += drawn
    return tokens


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", list(TURNS))
@pytest.mark.parametrize("text", [CALL, TWO, BROKEN, PLAIN], ids=["call", "two", "broken", "plain"])
def test_turns_of_each_dialect_are_one_row_of_drawn_tokens_and_rendered_tails(
    served: Served, text: str, dialect: str, streams: bool
):
    session, access = episode(served, text)
    TURNS[dialect](served, access, 3, streams=streams)
    served.forget(access)
    assert (session.counts["rows"], session.counts["joined_calls"]) == (1, 2), session.counts
    assert session.counts["ignored_sampling"] == session.counts["drifted_calls"] == 0
    has_calls = text in (CALL, TWO) or (text == BROKEN and streams)
    result = "<|im_start|>tool\nsunny<|im_end|>\n"
    if text == TWO:
        result += result
    between = result if has_calls else "<|im_start|>user\nmore<|im_end|>\n"
    row = session.rows[0]
    behind_turn = f"\n{between}<|im_start|>assistant\n"
    assert row.token_ids == expected_tokens(served, session, behind_turn)
    (finished,) = session.finish(1.0)
    drawn = finished.response_ids[finished.response_mask == 1].tolist()
    one = drawn[: len(drawn) // 3]
    assert drawn == one * 3 or text != PLAIN
    assert served.chat.tokenizer.decode(one).startswith(text[:3])
    prompt = served.chat.tokenizer.decode(finished.prompt_ids)
    assert prompt.endswith(
        "<|im_start|>user\nHow is it in Paris?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert '"name": "weather"' in prompt


def test_the_first_prompt_is_that_of_the_dataset(served: Served):
    session, access = episode(served, PLAIN)
    openai_client(served, access).chat.completions.create(model="policy", messages=[ASK])
    rendered = served.chat.tokenizer.apply_chat_template([ASK], add_generation_prompt=True)
    model: Any = session.model
    (request,) = model.requests
    assert request.prompt_ids == rendered["input_ids"]
    assert request.seed == session.spec.request.seed
    assert request.sampling == session.spec.request.sampling


def test_where_prompts_that_are_rendered_anew_would_drift_twenty_episodes_are_twenty_rows(
    served: Served,
):
    chance = random.Random(4)
    vocabulary = [
        token
        for token in range(len(served.chat.tokenizer))
        if token not in served.chat.tokenizer.all_special_ids
        and "tool_call" not in served.chat.tokenizer.decode([token])
    ]

    def script(request: GenerationRequest) -> list[int]:
        noise = chance.choices(vocabulary, k=12)
        call = split_at_random(served.chat, CALL.removeprefix("Let me see."), chance)
        return [*noise, *call, served.chat.tokenizer.eos_token_id]

    num_drifts = 0
    for _ in range(20):
        model = ScriptedModel(script)
        session = served.session(model)
        access = served.open(session)
        chat_turns(served, access, 5, streams=False)
        served.forget(access)
        assert session.counts["rows"] == 1 and session.counts["joined_calls"] == 4
        second = list(model.requests[1].prompt_ids)
        anew = served.chat.tokens(served.chat.tokenizer.decode(second))
        num_drifts += anew != second
    assert num_drifts >= 15


@pytest.mark.parametrize(
    ("change", "num_rows", "num_drifted"),
    [
        (
            lambda reply: reply["tool_calls"][0]["function"].update(
                arguments='{"day":2,"city":"Paris"}'
            ),
            1,
            0,
        ),
        (lambda reply: reply.update(content=[{"type": "text", "text": "Let me see."}]), 1, 0),
        (
            lambda reply: reply["tool_calls"][0]["function"].update(arguments='{"city":"Rome"}'),
            2,
            0,
        ),
        (lambda reply: reply.update(content="Let us see."), 2, 0),
    ],
    ids=["arguments in another order", "text as parts", "other arguments", "other text"],
)
def test_a_reply_is_recognised_by_its_meaning(
    served: Served, change: Callable[[dict], None], num_rows: int, num_drifted: int
):
    session, access = episode(served, CALL)
    client: Any = openai_client(served, access)
    answer = client.chat.completions.create(model="policy", messages=[ASK], tools=[WEATHER])
    reply = answer.choices[0].message.model_dump(exclude_none=True)
    change(reply)
    result = {"role": "tool", "tool_call_id": "x", "content": "sunny"}
    messages = [ASK, reply, result]
    client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
    assert session.counts["rows"] == num_rows
    assert session.counts["drifted_calls"] == num_drifted


def test_other_tools_begin_another_row(served: Served):
    session, access = episode(served, PLAIN)
    client: Any = openai_client(served, access)
    messages = [ASK, {"role": "assistant", "content": PLAIN}, ASK]
    client.chat.completions.create(model="policy", messages=[ASK], tools=[WEATHER])
    client.chat.completions.create(model="policy", messages=messages)
    client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
    assert session.counts["rows"] == 2 and session.counts["joined_calls"] == 1


@pytest.mark.parametrize(
    ("keeps", "returns", "ends_with_user", "num_rows", "num_drifted"),
    [
        (False, True, False, 1, 0),  # the template has the reasoning of this turn, too
        (False, True, True, 2, 1),  # the template leaves it out
        (False, False, False, 2, 0),  # the harness leaves it out
        (True, True, True, 1, 0),
        (True, False, True, 1, 0),
    ],
)
def test_reasoning_that_is_left_out_begins_a_row_unless_it_is_to_be_kept(
    thinking: Served,
    keeps: bool,
    returns: bool,
    ends_with_user: bool,
    num_rows: int,
    num_drifted: int,
):
    thinking.chat.keep_reasoning = keeps
    session, access = episode(thinking, "hm, two\n</think>\n\nTwo.")
    client: Any = openai_client(thinking, access)
    reply = client.chat.completions.create(model="policy", messages=[ASK]).choices[0].message
    assert reply.content.strip() == "Two." and reply.reasoning.strip() == "hm, two"
    kept = {"role", "content", "reasoning"} if returns else {"role", "content"}
    last = {"role": "user" if ends_with_user else "tool", "tool_call_id": "x", "content": "more"}
    messages = [ASK, reply.model_dump(include=kept), last]
    client.chat.completions.create(model="policy", messages=messages)
    assert session.counts["rows"] == num_rows
    assert session.counts["drifted_calls"] == num_drifted


def test_parallel_calls_of_a_sub_agent_are_rows_of_their_own(served: Served):
    session, access = episode(served, PLAIN)
    client: Any = openai_client(served, access)
    client.chat.completions.create(model="policy", messages=[ASK])
    reply = {"role": "assistant", "content": PLAIN}
    texts = ["one", "two", "three"]

    def ask(text: str) -> None:
        messages = [ASK, reply, {"role": "user", "content": text}]
        client.chat.completions.create(model="policy", messages=messages)

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert session.counts["calls"] == 4
    assert session.counts["rows"] == 3 and session.counts["joined_calls"] == 1
    beginning = session.rows[0].token_ids[: session.rows[0].num_prompt_tokens]
    for row in session.rows[1:]:
        assert row.token_ids[: len(beginning)] == beginning
        text = served.chat.tokenizer.decode(row.token_ids[: row.num_prompt_tokens])
        assert text.count("It is sunny.") == 1, "the drawn turn is part of its prompt"


def test_a_completion_has_the_drawn_tokens_their_log_probabilities_and_versions(served: Served):
    session, access = episode(served, "sunny!")
    prompt = served.chat.tokens("the weather is")
    answer = openai_client(served, access).completions.create(
        model="policy",
        prompt=prompt,
        logprobs=0,
        max_tokens=200,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    drawn = session.rows[0].token_ids[len(prompt) :]
    end = served.chat.tokenizer.eos_token_id
    assert choice.text == "sunny!" and choice.finish_reason == "stop"
    extra: Any = choice
    assert extra.token_ids == drawn and drawn[-1] == end and extra.stop_reason == end
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(session.rows[0].log_probs)
    assert choice.logprobs.token_logprobs[0] == pytest.approx(-0.25)
    body = {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 3, "logprobs": 0},
        "model": "policy",
    }
    tokens = post(served, access, "/inference/v1/generate", body).json()
    (choice,) = tokens["choices"]
    assert choice["token_ids"] == drawn[:3] and choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"][2]["logprob"] == pytest.approx(-0.75)
    assert session.rows[1].spans == [(7, 0, 2), (8, 2, 3)]


def test_versions_and_cached_tokens_come_with_the_output_of_the_engine(served: Served):
    """As vLLM's server gets them: not every dialect has a place for them."""
    _session, access = episode(served, "sunny!")
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}, "model": "policy"}
    answer = post(served, access, "/inference/v1/generate", body).json()
    assert '"version":"8"' in json.dumps(answer).replace(" ", ""), answer


def test_texts_and_tokens_of_the_harness_stop_a_completion(served: Served):
    _session, access = episode(served, "one two three four")
    client: Any = openai_client(served, access)
    options = {"model": "policy", "prompt": [5, 6], "max_tokens": 100}
    (choice,) = client.completions.create(**options, stop=["three", "wo"]).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one t", "stop", "wo")
    extra = {"include_stop_str_in_output": True, "min_tokens": 60}
    (choice,) = client.completions.create(**options, stop="three", extra_body=extra).choices
    assert (choice.text, choice.stop_reason) == ("one two three", "three")
    token = served.chat.tokens("u")[0]
    (choice,) = client.completions.create(**options, extra_body={"stop_token_ids": [token]}).choices
    assert choice.text == "one two three fo" and choice.stop_reason == token
    (choice,) = client.completions.create(**{**options, "max_tokens": 2}).choices
    assert choice.finish_reason == "length" and "one two".startswith(choice.text)


def test_special_tokens_are_part_of_a_text_only_where_they_are_asked_for(served: Served):
    tokenizer = served.chat.tokenizer
    special = tokenizer.convert_tokens_to_ids("<|eot|>")
    drawn = [*served.chat.tokens("a"), special, *served.chat.tokens("b"), tokenizer.eos_token_id]
    session = served.session(ScriptedModel(lambda request: drawn))
    client: Any = openai_client(served, served.open(session))
    for skips, text in ((True, "ab"), (False, "a<|eot|>b")):
        (choice,) = client.completions.create(
            model="policy", prompt=[5], max_tokens=9, extra_body={"skip_special_tokens": skips}
        ).choices
        assert choice.text == text


def test_a_completion_is_streamed(served: Served):
    _session, access = episode(served, "sunny!")
    client: Any = openai_client(served, access)
    stream = client.completions.create(model="policy", prompt=[5, 6], max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "sunny!"


def test_a_call_that_has_to_be_one_is_read_as_any_other(served: Served):
    session, access = episode(served, CALL)
    client: Any = openai_client(served, access)
    answer = client.chat.completions.create(
        model="policy", messages=[ASK], tools=[WEATHER], tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    answer = client.chat.completions.create(
        model="policy", messages=[ASK], tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    reply = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "user", "content": "more"}
    client.chat.completions.create(
        model="policy", messages=[ASK, reply, result], tools=[WEATHER], tool_choice="none"
    )
    assert session.counts["rows"] == 2 and session.counts["joined_calls"] == 1


CHAT = "/v1/chat/completions"
CHAT_BODY = {"model": "policy", "messages": [ASK]}
GENERATE = "/inference/v1/generate"
TOKENS = {"token_ids": [5, 6], "model": "policy"}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, {**CHAT_BODY, "n": 2}, "n=2 is not served"),
        (CHAT, {**CHAT_BODY, "n": "2"}, "n='2' is not served"),
        (CHAT, {**CHAT_BODY, "n": 3, "stream": True}, "n=3 is not served"),
        (CHAT, {**CHAT_BODY, "n": 4, "sampling_params": {"n": 1}}, "n=4 is not served"),
        ("/v1/completions", {"model": "policy", "prompt": "a", "best_of": 3}, "best_of=3"),
        (CHAT, {**CHAT_BODY, "stop_token_ids": [10**30]}, "is out of vocabulary"),
        (CHAT, {**CHAT_BODY, "use_beam_search": True}, "use_beam_search=True"),
        (CHAT, {**CHAT_BODY, "logprobs": True, "top_logprobs": 2}, "top_logprobs=2"),
        (CHAT, {**CHAT_BODY, "prompt_logprobs": 0}, "prompt_logprobs=0"),
        (CHAT, {**CHAT_BODY, "echo": True}, "echo=True"),
        (CHAT, {**CHAT_BODY, "logprobs": True, "logprob_token_ids": [3]}, "logprob_token_ids"),
        ("/v1/completions", {"model": "policy", "prompt": "a", "logprobs": 5}, "logprobs=5"),
        ("/v1/completions", {"model": "policy", "prompt": "a", "echo": True}, "echo=True"),
        ("/v1/responses", {"model": "policy", "input": "a", "top_logprobs": 1}, "top_logprobs=1"),
        (
            "/v1/responses",
            {"model": "policy", "input": "a", "previous_response_id": "resp_1"},
            "previous_response_id='resp_1' is not served, because no messages are kept",
        ),
        (
            "/v1/responses",
            {"model": "policy", "input": "a", "conversation": "conv_1"},
            "conversation='conv_1' is not served",
        ),
        (
            "/v1/messages",
            {**CHAT_BODY, "max_tokens": 9, "thread": {"type": "create"}},
            "thread_unsupported_request",
        ),
        (GENERATE, {**TOKENS, "sampling_params": {"n": 2}}, "n=2"),
        (GENERATE, {**TOKENS, "sampling_params": {"prompt_logprob_token_ids": [[1]]}}, "token_ids"),
        (GENERATE, {"token_ids": [5, 100_000], "sampling_params": {}}, "Token id 100000 is out of"),
        (
            "/v1/completions",
            {"model": "policy", "prompt": [5, 100_000]},
            "Token id 100000 is out of",
        ),
        ("/v1/completions", {"model": "policy", "prompt": [5, -1]}, "greater than or equal to 0"),
        (
            "/v1/completions",
            {"model": "policy", "prompt": [5, 100_000], "stream": True},
            "Token id 100000 is out of",
        ),
        (CHAT, {**CHAT_BODY, "model": "gpt"}, "gpt"),
        (CHAT, {"model": "policy"}, "messages"),
        (CHAT, b"{", "JSON"),
        (CHAT, b"[]", "validation error"),
        (CHAT, "[" * 20_000, ""),
    ],
)
def test_what_cannot_be_served_is_answered_with_an_error_and_draws_nothing(
    served: Served, path: str, body: Any, text: str
):
    session, access = episode(served, PLAIN)
    answer = post(served, access, path, body)
    assert 400 <= answer.status_code < 500 or body == "[" * 20_000, answer.text
    assert text in answer.text
    model: Any = session.model
    assert not model.requests and not session.counts["ignored_sampling"]


@pytest.mark.parametrize("name", list(SERVED))
def test_a_setting_with_a_value_that_asks_for_nothing_is_served(served: Served, name: str):
    session, access = episode(served, PLAIN)
    for value in SERVED[name]:
        body = {"model": "policy", "prompt": "a", name: value, "max_tokens": 5}
        answer = post(served, access, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
    post(served, access, "/v1/completions", {"model": "policy", "prompt": "a", name: None})
    assert session.counts["ignored_sampling"] == 0


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "seed": 3,
    "min_tokens": 1,
    "ignore_eos": True,
    "bad_words": ["no"],
    "allowed_token_ids": [5],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 4,
}
"""The settings of sampling that vLLM's server takes, with values that change what is drawn."""


@pytest.mark.parametrize("name", SAMPLING)
def test_a_request_that_sets_sampling_is_counted_and_drawn_as_configured(served: Served, name: str):
    session, access = episode(served, PLAIN)
    body = {**CHAT_BODY, name: SAMPLING[name], "max_tokens": 20}
    answer = post(served, access, CHAT, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == PLAIN
    assert session.counts["ignored_sampling"] == 1
    model: Any = session.model
    (request,) = model.requests
    assert request.sampling == replace(session.spec.request.sampling, max_tokens=20)
    assert request.seed == session.spec.request.seed


def test_every_setting_that_is_ignored_is_one_of_sampling():
    assert set(IGNORED) == set(SAMPLING)


def test_sampling_of_the_dialects_is_counted(served: Served):
    session, access = episode(served, PLAIN)
    inner = {"token_ids": [5, 6], "sampling_params": {"temperature": 0.1, "max_tokens": 5}}
    assert post(served, access, GENERATE, inner).status_code == 200
    assert session.counts["ignored_sampling"] == 1
    body = {"model": "policy", "input": "a", "temperature": 1.0}
    assert post(served, access, "/v1/responses", body).status_code == 200
    body = {"model": "policy", "messages": [ASK], "top_p": 1, "max_tokens": 20}
    assert post(served, access, "/v1/messages", body).status_code == 200
    assert session.counts["ignored_sampling"] == 3


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHAT_BODY),
        ("/v1/responses", {"model": "policy", "input": [ASK]}),
        ("/v1/messages", {**CHAT_BODY, "max_tokens": 100}),
        ("/v1/completions", {"model": "policy", "prompt": "How is it in Paris, please?"}),
        (GENERATE, {"token_ids": [5] * 30, "sampling_params": {"max_tokens": 9}}),
    ],
)
def test_a_prompt_without_room_is_refused_and_counts_once_the_policy_has_acted(
    served: Served, path: str, body: dict, streams: bool
):
    session, access = episode(served, PLAIN, limits=replace(LIMITS, first_prompt=8, context=12))
    body = {**body, "stream": streams}
    answer = post(served, access, path, body)
    assert answer.status_code == 400 and "data.max_prompt_length=8" in answer.text
    assert session.counts["room_used_up"] == 0, "it is the harness's prompt"
    short = {"model": "policy", "prompt": [5, 6], "max_tokens": 5}
    assert post(served, access, "/v1/completions", short).status_code == 200
    answer = post(served, access, path, body)
    assert answer.status_code == 400 and "context of 12 leave no room" in answer.text
    assert session.counts["room_used_up"] == 1 and session.counts["calls"] == 1


def test_a_model_is_named_and_found(served: Served):
    _session, access = episode(served, PLAIN)
    client = openai_client(served, access)
    assert [model.id for model in client.models.list()] == ["policy"]


def headers_with(served: Served, **headers: str) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"authorization": f"Bearer {served.endpoint.api_key}", **named}


def test_a_request_needs_the_key_of_the_run_and_the_secret_of_an_episode(served: Served):
    session, access = episode(served, PLAIN)
    base = access.base_url.partition("/s/")[0]
    key = served.endpoint.api_key
    other_secret = access.base_url.replace(access.secret, access.secret[:-1])
    mine = f"{access.base_url}/models"
    cases = [
        (mine, {"authorization": f"Bearer {key}"}, 200),
        (mine, {"x-api-key": key}, 200),
        (f"{base}/v1/models", headers_with(served, x_session_id=access.secret), 200),
        (mine, {}, 401),
        (mine, {"authorization": f"Bearer {key}x"}, 401),
        (mine, {"authorization": "Bearer"}, 401),
        (mine, {"x-api-key": access.secret}, 401),
        (f"{base}/v1/models", headers_with(served), 403),
        (f"{base}/v1/models", headers_with(served, x_session_id=key), 403),
        (f"{base}/v1/models", headers_with(served, x_session_id=f"{access.secret}x"), 403),
        (f"{other_secret}/models", headers_with(served), 403),
        (f"{base}/s//v1/models", headers_with(served), 403),
        (f"{base}/s/%F0%9F%98%80/v1/models", headers_with(served), 403),
    ]
    for url, headers, status in cases:
        answer = httpx.get(url, headers=headers)
        assert answer.status_code == status, (url, headers, answer.text)
    served.forget(access)
    answer = httpx.get(mine, headers=headers_with(served))
    assert answer.status_code == 403 and "has ended" in answer.text
    assert not session.counts["calls"]


def test_the_secret_of_an_episode_opens_that_episode_alone(served: Served):
    first, first_access = episode(served, PLAIN)
    second, second_access = episode(served, PLAIN)
    openai_client(served, first_access).completions.create(model="policy", prompt=[5])
    served.forget(first_access)
    openai_client(served, second_access).completions.create(model="policy", prompt=[5])
    assert first.counts["calls"] == second.counts["calls"] == 1


def test_of_all_routes_of_the_server_only_the_listed_ones_answer(served: Served):
    _session, access = episode(served, PLAIN)
    root = access.base_url.removesuffix("/v1")
    seen = []
    for route in served.endpoint.app.routes:
        for method in getattr(route, "methods", None) or {"GET", "POST"}:
            path = route.path.replace("{response_id}", "resp_1")
            seen.append(f"{method} {path}")
            answer = httpx.request(
                method, f"{root}{path}", headers=headers_with(served), timeout=30
            )
            if seen[-1] in ROUTES:
                assert answer.status_code != 404, seen[-1]
            else:
                assert answer.status_code == 404, (seen[-1], answer.text)
                assert "no such route" in answer.text or method == "HEAD"
    assert len(seen) > 30 and {"GET /metrics", "POST /tokenize"} < set(seen)
    assert set(ROUTES) - set(seen) == {"POST /reward"}
    for method, path in (
        ("PUT", "/v1/models"),
        ("GET", "/v1/models/"),
        ("GET", "//v1/models"),
        ("POST", "/v1/chat/completions/render"),
        ("GET", "/reward"),
        ("GET", ""),
    ):
        answer = httpx.request(method, f"{root}{path}", headers=headers_with(served))
        assert answer.status_code == 404, (method, path)


LOGGERS = ("", "vllm", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")


def test_secrets_are_neither_logged_nor_part_of_errors(served: Served):
    records: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage() + str(record.exc_info))

    handler = Keeping()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    _session, access = episode(served, BROKEN)
    answers = []
    try:
        chat_turns(served, access, 2, streams=False)
        for path in ("/v1/models", "/nothing", f"/s/{access.secret}", f"/{access.secret}"):
            answers.append(post(served, access, path, {}).text)
        for body in (
            {},
            {**CHAT_BODY, "n": 2},
            {**CHAT_BODY, "model": "gpt"},
            b"{",
            {"messages": 3},
        ):
            answers.append(post(served, access, CHAT, body).text)
        answers.append(post(served, access, "/reward", {}).text)
        served.forget(access)
        answers.append(post(served, access, CHAT, CHAT_BODY).text)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert any("tool call" in record for record in records), "vLLM has logged something"
    client_records = (
        "HTTP Request",
        "Request options",
        "Sending HTTP",
        "connect_tcp",
        "send_request",
    )
    ours = [record for record in records if not record.startswith(client_records)]
    for text in [*ours, *answers]:
        for secret in (access.secret, served.endpoint.api_key, served.endpoint.reward_key):
            assert secret not in text


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_requests_that_wait_when_the_episode_ends_are_answered_with_an_error(
    served: Served, streams: bool
):
    session, access = episode(served, PLAIN)
    model: Any = session.model
    model.is_held = True
    body = {**CHAT_BODY, "stream": streams}
    thread, answers = in_thread(lambda: post(served, access, CHAT, body))
    wait_for(lambda: model.requests)
    served.forget(access)
    thread.join(30)
    (answer,) = answers
    assert answer.status_code == (200 if streams else 400), "a stream has begun"
    assert "This episode has ended" in answer.text
    assert model.cancelled == [model.requests[0].name]
    assert session.counts["calls"] == 0 and not session.rows


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHAT_BODY),
        ("/v1/responses", {"model": "policy", "input": [ASK]}),
        ("/v1/messages", {**CHAT_BODY, "max_tokens": 20}),
        ("/v1/completions", {"model": "policy", "prompt": [5]}),
        (GENERATE, {**TOKENS, "sampling_params": {}}),
    ],
)
def test_a_client_that_leaves_ends_its_request(
    served: Served, path: str, body: dict, streams: bool
):
    session, access = episode(served, PLAIN)
    model: Any = session.model
    model.is_held = True
    with pytest.raises(httpx.ReadTimeout):
        root = access.base_url.removesuffix("/v1")
        httpx.post(
            f"{root}{path}",
            json={**body, "stream": streams},
            headers=headers_with(served),
            timeout=httpx.Timeout(5, read=0.3),
        )
    wait_for(lambda: model.cancelled)
    model.is_held = False
    assert post(served, access, CHAT, CHAT_BODY).status_code == 200, "the episode goes on"
    assert session.counts["calls"] == 1


def test_a_request_that_was_admitted_before_the_end_and_begins_after_it_draws_nothing(
    served: Served,
):
    session, access = episode(served, PLAIN)
    access.check([5, 6])
    served.forget(access)
    with pytest.raises(ValueError, match="This episode has ended"):
        served.do(access.draw([5, 6]))
    model: Any = session.model
    assert not model.requests and not session.counts["calls"]


def test_a_call_past_its_deadline_fails_the_episode_and_not_the_harness(served: Served):
    session, access = episode(served, PLAIN, limits=replace(LIMITS, call_timeout_s=0.2))
    model: Any = session.model
    model.is_held = True
    answer = post(served, access, CHAT, CHAT_BODY)
    assert answer.status_code == 400, "a client would try again after a 5xx"
    assert access.failure is not None and access.failure.kind == "deadline"
    model.is_held = False
    assert post(served, access, CHAT, CHAT_BODY).status_code == 400
    assert session.counts["calls"] == 0


@pytest.mark.parametrize("reward", [0.25, 3, -1, [0.5, 1]])
def test_a_reward_is_posted_with_its_own_key(served: Served, reward: Any):
    _session, access = episode(served, PLAIN)
    headers = {"x-reward-key": served.endpoint.reward_key}
    answer = post(served, access, "/reward", {"reward": reward}, headers)
    assert answer.status_code == 200 and access.reward == reward
    answer = post(served, access, "/reward", {"reward": 7}, headers)
    assert answer.status_code == 409 and access.reward == reward
    served.forget(access)
    assert post(served, access, "/reward", {"reward": 1}, headers).status_code == 403


def test_a_reward_without_its_key_is_refused(served: Served):
    _session, access = episode(served, PLAIN)
    for key in ("", served.endpoint.api_key, access.secret, f"{served.endpoint.reward_key}x"):
        answer = post(served, access, "/reward", {"reward": 1}, {"x-reward-key": key})
        assert answer.status_code == 403 and "reward_key()" in answer.text
    headers = {"x-reward-key": served.endpoint.reward_key, "authorization": "Bearer x"}
    assert post(served, access, "/reward", {"reward": 1}, headers).status_code == 401
    assert access.reward is None


@pytest.mark.parametrize(
    "body",
    [
        '{"reward": NaN}',
        '{"reward": Infinity}',
        '{"reward": 1e999}',
        '{"reward": "1"}',
        '{"reward": true}',
        '{"reward": null}',
        '{"reward": [1, "2"]}',
        '{"reward": {}}',
        "{}",
        "1",
        "",
        '{"reward": ' + "9" * 5000 + "}",
    ],
)
def test_what_is_no_reward_is_refused(served: Served, body: str):
    _session, access = episode(served, PLAIN)
    headers = {"x-reward-key": served.endpoint.reward_key}
    answer = post(served, access, "/reward", body, headers)
    assert answer.status_code == 400 and "a finite number" in answer.text
    assert access.reward is None
    assert post(served, access, "/reward", {"reward": 1}, headers).status_code == 200


def test_the_reward_key_is_read_where_it_was_set():
    assert reward_key() == ""
    set_reward_key("a key")
    assert reward_key() == "a key"
    set_reward_key("")


def test_a_port_that_is_taken_is_refused(served: Served):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"agent.port leads to port {port}, which cannot"):
            Endpoint(served.chat, served.endpoint.model, port=port)
    _session, access = episode(served, PLAIN)
    assert access.base_url.startswith("http://127.0.0.1:")


def run_harness(served: Served, run: Callable[..., Any], *texts: str, limits=LIMITS):
    """An episode of a harness, and what became of its seat."""
    hosts: Any = InProcess(run)
    session = served.session(model_that_says(served, *texts), limits)
    harness = Harness(hosts, served.endpoint, timeout_s=12.5)
    try:
        return served.do(harness.run(session)), session, hosts
    except Exception as error:
        return error, session, hosts


async def ask(base_url: str, api_key: str, messages: list[Any]) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return await client.chat.completions.create(model="policy", messages=messages, max_tokens=9)


def test_a_harness_calls_the_model_and_returns_its_reward(served: Served):
    seen = {}

    async def run(row, base_url, api_key):
        seen.update(row=row, base_url=base_url, key=api_key)
        answer = await ask(base_url, api_key, [ASK])
        return [len(answer.choices[0].message.content) / 10]

    outcome, session, hosts = run_harness(served, run, "abc")
    assert outcome == Outcome([0.3])
    assert seen["row"] == session.spec.row
    assert hosts.num_left == 1
    assert session.counts["calls"] == 1
    answer = httpx.get(f"{seen['base_url']}/models", headers=headers_with(served))
    assert answer.status_code == 403, "its access has ended with it"


@pytest.mark.parametrize(("returned", "reward"), [(None, 0.75), (0.5, 0.5), (0.0, 0.0)])
def test_a_posted_reward_counts_where_the_harness_returns_none(
    served: Served, returned: float | None, reward: float
):
    async def run(row, base_url, api_key):
        headers = headers_with(served, x_reward_key=served.endpoint.reward_key)
        url = base_url.removesuffix("/v1") + "/reward"
        async with httpx.AsyncClient() as client:
            await client.post(url, json={"reward": 0.75}, headers=headers)
        return returned

    outcome, *_ = run_harness(served, run, PLAIN)
    assert outcome == Outcome(reward)


@pytest.mark.parametrize(("returned", "has_problem"), [(None, True), (0.5, False)])
def test_a_posted_reward_that_is_none_is_a_problem_of_the_reward(
    served: Served, returned: float | None, has_problem: bool
):
    async def run(row, base_url, api_key):
        headers = headers_with(served, x_reward_key=served.endpoint.reward_key)
        url = base_url.removesuffix("/v1") + "/reward"
        async with httpx.AsyncClient() as client:
            answer = await client.post(url, content='{"reward": NaN}', headers=headers)
        assert answer.status_code == 400
        return returned

    outcome, *_ = run_harness(served, run, PLAIN)
    if has_problem:
        assert isinstance(outcome, RewardProblem) and "a finite number" in str(outcome)
    else:
        assert outcome == Outcome(0.5)


def test_a_harness_without_a_reward_is_left_out(served: Served):
    async def run(row, base_url, api_key):
        return None

    outcome, *_ = run_harness(served, run, PLAIN)
    assert outcome.reward is None and outcome.is_scored


def test_a_harness_that_raises_fails_the_episode(served: Served):
    async def run(row, base_url, api_key):
        await ask(base_url, api_key, [ASK])
        raise KeyError("city")

    error, _session, hosts = run_harness(served, run, PLAIN)
    assert isinstance(error, EpisodeFailed) and error.kind == "harness"
    assert str(error).startswith("run raised ") and "KeyError: 'city'" in str(error)
    assert hosts.num_left == 1


def test_the_text_of_a_failure_has_no_secret(served: Served):
    async def run(row, base_url, api_key):
        raise OSError(f"error 500 of {base_url}/chat/completions with {api_key}")

    error, *_ = run_harness(served, run, PLAIN)
    assert "error 500 of http://127.0.0.1:" in str(error)
    assert "/s/***/v1/chat/completions with ***" in str(error)


def test_the_failure_of_a_harness_does_not_name_the_secret_of_its_address(served: Served):
    async def run(row, base_url, api_key):
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{base_url}/nothing")
        answer.raise_for_status()

    error, *_ = run_harness(served, run, PLAIN)
    assert isinstance(error, EpisodeFailed) and error.kind == "harness"
    assert "404 Not Found" in str(error) and "/s/***/v1/nothing" in str(error)


def test_a_harness_that_raises_when_the_room_is_used_up_is_trained_with_reward_0(served: Served):
    async def run(row, base_url, api_key):
        answer = await ask(base_url, api_key, [ASK])
        reply = {"role": "assistant", "content": answer.choices[0].message.content}
        await ask(base_url, api_key, [ASK, reply, ASK])

    limits = replace(LIMITS, response=20)
    outcome, session, _hosts = run_harness(served, run, PLAIN, limits=limits)
    assert outcome == Outcome(0.0, "room")
    assert session.counts["calls"] == 1

    async def run_too_long(row, base_url, api_key):
        await ask(base_url, api_key, [ASK])

    error, *_ = run_harness(served, run_too_long, PLAIN, limits=replace(LIMITS, first_prompt=5))
    assert isinstance(error, EpisodeFailed) and error.kind == "harness", "the policy never acted"


def test_a_harness_that_goes_on_when_the_room_is_used_up_has_its_reward(served: Served):
    async def run(row, base_url, api_key):
        await ask(base_url, api_key, [ASK])
        with pytest.raises(openai.BadRequestError):
            await ask(base_url, api_key, [{"role": "user", "content": "long " * 400}])
        await ask(base_url, api_key, [{"role": "user", "content": "in short"}])
        return 0.5

    outcome, session, _hosts = run_harness(served, run, PLAIN)
    assert outcome == Outcome(0.5)
    assert session.counts["calls"] == 2 and session.counts["room_used_up"] == 1


@pytest.mark.parametrize("catches", [False, True])
def test_a_model_that_does_not_answer_is_no_failure_of_the_harness(served: Served, catches: bool):
    async def run(row, base_url, api_key):
        try:
            await ask(base_url, api_key, [ASK])
        except openai.APIError:
            if not catches:
                raise
        return 0.0

    hosts: Any = InProcess(run)
    model = model_that_says(served, PLAIN)
    model.is_held = True
    session = served.session(model, replace(LIMITS, call_timeout_s=0.2))
    harness = Harness(hosts, served.endpoint, timeout_s=12.5)
    with pytest.raises(EpisodeFailed, match=r"a call of the model took over 0\.2 s") as caught:
        served.do(harness.run(session))
    assert caught.value.kind == "deadline"


def test_a_cancelled_episode_leaves_no_request(served: Served):
    async def run(row, base_url, api_key):
        await ask(base_url, api_key, [ASK])

    hosts: Any = InProcess(run)
    model = model_that_says(served, PLAIN)
    model.is_held = True
    session = served.session(model)
    harness = Harness(hosts, served.endpoint, timeout_s=12.5)

    async def cancelled() -> None:
        task = asyncio.create_task(harness.run(session))
        while not model.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()

    num_before = len(served.endpoint._accesses)
    served.do(cancelled())
    wait_for(lambda: model.cancelled)
    assert hosts.num_left == 1
    assert len(served.endpoint._accesses) == num_before
    assert not session.rows


def test_the_way_of_a_harness_starts_and_closes_its_endpoint(served: Served):
    async def run(row, base_url, api_key):
        return 1.0

    endpoint = Endpoint(served.chat, served.endpoint.model, port=0)
    hosts: Any = InProcess(run)
    harness = Harness(hosts, endpoint, timeout_s=12.5)
    session = served.session(model_that_says(served, PLAIN))

    async def live() -> tuple[int, str]:
        await harness.start()
        access = endpoint.open(session)
        headers = {"x-api-key": endpoint.api_key}
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{access.base_url}/models", headers=headers)
        await harness.close()
        return answer.status_code, access.base_url

    status, base_url = served.do(live())
    assert status == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(base_url)


def test_the_runner_runs_harnesses_on_its_own_event_loop(served: Served):
    failing = []

    async def run(row, base_url, api_key):
        answer = await ask(base_url, api_key, [ASK])
        if row["number"] == 2 and not failing:
            failing.append(row)
            raise OSError("the first attempt")
        return float(len(answer.choices[0].message.content))

    endpoint = Endpoint(served.chat, served.endpoint.model, port=0)
    hosts: Any = InProcess(run)
    runner = EpisodeRunner(
        Harness(hosts, endpoint, timeout_s=12.5),
        LIMITS,
        AgentConfig(num_attempts=2, max_episodes=3, episode_timeout_s=30.0),
    )
    model = model_that_says(served, "ab")
    specs = []
    for number in range(5):
        request = served.session(model).spec.request
        specs.append(EpisodeSpec(request, {"number": number}))
    runner.begin(specs)
    episodes: dict[str, Episode] = {}
    answers: dict[str, Completion] = {}
    deadline = time.monotonic() + 60
    while len(episodes) < 5:
        assert time.monotonic() < deadline
        news = runner.exchange(answers, 0.05)
        answers = {each.name: asyncio.run(model.complete(each)) for each in news.requests}
        episodes |= {each.name: each for each in news.episodes}
    runner.close()
    for number, spec in enumerate(specs):
        ended = episodes[spec.request.name]
        assert ended.ended == "done" and ended.has_reward
        (row,) = ended.rows
        assert row.scores.tolist() == [0] * (len(row.scores) - 1) + [2]
        assert [kind for kind, _text in ended.failures] == ["harness"] * (number == 2)
