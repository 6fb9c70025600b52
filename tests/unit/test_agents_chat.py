"""How messages become tokens behind those that were drawn, and drawn tokens messages; by several
chat templates, with texts written out by hand."""

import json
import logging
import os

import pytest
from agent_endpoints import (
    CHATML,
    HEADERS,
    THINKING,
    WEATHER,
    WITHOUT_ENDS,
    make_chat,
    make_tokenizer,
)
from optional_packages import needs_vllm

from verl_like.workers.agents.chat import ChatFormat, Conversation, arguments_of, text_of

pytestmark = needs_vllm

USER = {"role": "user", "content": "How is it in Paris?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "day": 2}}\n</tool_call>'
REPLY = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "function": {"name": "weather", "arguments": {"city": "Paris", "day": 2}},
            "type": "function",
        }
    ],
}
PLAIN = {"role": "assistant", "content": "It is sunny."}
RESULT = {"role": "tool", "content": "sunny"}
MORE = {"role": "user", "content": "And Rome?"}


def tail_of(
    chat: ChatFormat, messages: list, drawn: list[int], more: list, tools: list | None = None
) -> str | None:
    """The text of the tail behind a turn: `messages` end with its reply, and `more` follow."""
    before = chat.render(messages, tools or [], is_prompt=False)
    prompt = chat.render([*messages, *more], tools or [], is_prompt=True)
    tail = chat.tail(prompt, before, drawn)
    return None if tail is None else chat.tokenizer.decode(tail)


@pytest.mark.parametrize(
    ("template", "end", "reply", "tools", "more", "tail"),
    [
        (
            *(CHATML, "<|im_end|>", REPLY, [WEATHER], [RESULT]),
            "\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            *(CHATML, "<|im_end|>", PLAIN, [], [MORE]),
            "\n<|im_start|>user\nAnd Rome?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            *(HEADERS, "<|eot|>", PLAIN, [], [RESULT, MORE]),
            "<|head|>ipython<|/head|>\n\nsunny<|eot|><|head|>user<|/head|>\n\nAnd Rome?<|eot|>"
            "<|head|>assistant<|/head|>\n\n",
        ),
        (WITHOUT_ENDS, "<|eot|>", PLAIN, [], [MORE], "user: And Rome?\nassistant:"),
    ],
    ids=["ChatML with tools", "ChatML", "headers", "without ends"],
)
def test_the_tail_is_what_the_template_writes_behind_a_turn_that_ended(
    template, end, reply, tools, more, tail
):
    tokenizer = make_tokenizer(template, end=end)
    chat = make_chat(tokenizer)
    drawn = [*chat.tokens("any text"), tokenizer.eos_token_id]
    assert tail_of(chat, [USER, reply], drawn, more, tools) == tail


def test_a_turn_that_did_not_end_gets_the_end_that_the_template_writes():
    chat = make_chat(make_tokenizer(CHATML))
    tail = tail_of(chat, [USER, PLAIN], chat.tokens("cut off"), [MORE])
    assert tail == "<|im_end|>\n<|im_start|>user\nAnd Rome?<|im_end|>\n<|im_start|>assistant\n"
    chat = make_chat(make_tokenizer(WITHOUT_ENDS, end="<|eot|>"))
    tail = tail_of(chat, [USER, PLAIN], chat.tokens("cut off"), [MORE])
    assert tail == "user: And Rome?\nassistant:", "this template ends no turn"


@pytest.mark.parametrize("given", ["INFO", None])
def test_vllm_logs_only_what_is_critical_unless_the_environment_says_otherwise(monkeypatch, given):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    if given is None:
        monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    make_chat(make_tokenizer(CHATML))
    level = logging.getLevelNamesMapping()[os.environ["VLLM_LOGGING_LEVEL"]]
    assert level == (logging.CRITICAL if given is None else logging.INFO)


def test_the_end_of_a_template_is_the_one_that_stands_last_of_the_models_ends():
    tokenizer = make_tokenizer(HEADERS, end="<|eot|>")
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    chat = ChatFormat(
        tokenizer, {}, ends, tool_parser="hermes", reasoning_parser=None, keep_reasoning=False
    )
    quoting = {"role": "user", "content": "What is <|im_end|>?"}
    tail = tail_of(chat, [quoting, PLAIN], [ends[1]], [MORE])
    assert tail is not None and tail.startswith("<|head|>user")
    tail = tail_of(chat, [quoting, PLAIN], [ends[0]], [MORE])
    assert tail is not None and tail.startswith("<|eot|><|head|>user"), "it ended in another way"


def test_a_prompt_of_recorded_tokens_and_tail_reads_as_the_prompt_that_is_rendered_anew():
    tokenizer = make_tokenizer(CHATML)
    chat = make_chat(tokenizer)
    first = chat.tokens(chat.render([USER], [WEATHER], is_prompt=True))
    drawn = [*chat.tokens(CALL), tokenizer.eos_token_id]
    before = chat.render([USER, REPLY], [WEATHER], is_prompt=False)
    prompt = chat.render([USER, REPLY, RESULT], [WEATHER], is_prompt=True)
    tail = chat.tail(prompt, before, drawn)
    assert tail is not None
    assert tokenizer.decode([*first, *drawn, *tail]) == prompt


def thinking(answer: str) -> dict:
    return {"role": "assistant", "content": answer, "reasoning_content": "hm"}


def test_a_template_that_drops_reasoning_from_earlier_turns_is_continued_only_if_it_is_to_be_kept():
    tokenizer = make_tokenizer(THINKING)
    ended = [tokenizer.eos_token_id]
    turn = [USER, thinking("one")]
    dropping = make_chat(tokenizer, reasoning_parser="qwen3")
    keeping = make_chat(tokenizer, reasoning_parser="qwen3", keep_reasoning=True)
    tail = "\n<|im_start|>user\nAnd Rome?<|im_end|>\n<|im_start|>assistant\n"
    assert tail_of(dropping, turn, ended, [MORE]) is None
    assert tail_of(keeping, turn, ended, [MORE]) == tail
    # A later turn: two more messages have ended before it, one of which lost its reasoning.
    later = [*turn, MORE, thinking("two")]
    assert tail_of(keeping, later, ended, [MORE]) == tail
    # Behind a tool's result the template still has the reasoning.
    tail = "\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    assert tail_of(dropping, turn, ended, [RESULT]) == tail


def test_a_prompt_that_does_not_have_the_turn_is_not_continued():
    tokenizer = make_tokenizer(CHATML)
    chat = make_chat(tokenizer, keep_reasoning=True)
    before = chat.render([USER, PLAIN, MORE, PLAIN], [], is_prompt=False)
    prompt = chat.render([USER, PLAIN], [], is_prompt=False)
    assert chat.tail(prompt, before, [tokenizer.eos_token_id]) is None, "fewer turns end in it"
    chat = make_chat(make_tokenizer(WITHOUT_ENDS, end="<|eot|>"), keep_reasoning=True)
    assert chat.tail("another text", "a text", [5]) is None


def test_messages_mean_the_same_whatever_the_order_and_form_of_their_arguments():
    chat = make_chat(make_tokenizer())
    as_text = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "9", "function": {"name": "weather", "arguments": '{"day":2, "city":"Paris"}'}}
        ],
    }
    assert chat.meaning(REPLY) == chat.meaning(as_text)
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "sunny. "}]
    assert chat.meaning({"role": "assistant", "content": parts}) == chat.meaning(PLAIN)
    for other in (
        {**PLAIN, "role": "user"},
        {**PLAIN, "content": "It is sunny"},
        {**PLAIN, "reasoning": "hm"},
        {**PLAIN, "tool_calls": REPLY["tool_calls"]},
    ):
        assert chat.meaning(other) != chat.meaning(PLAIN), other


def test_arguments_that_are_no_object_count_as_none_as_they_do_in_a_prompt():
    chat = make_chat(make_tokenizer())

    def meaning(arguments) -> tuple:
        call = {"function": {"name": "weather", "arguments": arguments}}
        return chat.meaning({"role": "assistant", "content": "", "tool_calls": [call]})

    assert meaning('{"city": "Par') == meaning({}) == meaning("[1]") == meaning(None)
    assert meaning("{}") != meaning('{"city": "Paris"}')
    assert arguments_of('{"city": "Par') == '{"city": "Par', "a tool loop tells the model"
    assert arguments_of("[" * 10_000) == "[" * 10_000
    assert arguments_of(None) is None
    assert text_of([{"text": "a"}, {"type": "image"}, "no part", {"text": None}]) == "a"


def test_reasoning_is_part_of_a_meaning_unless_it_is_to_be_kept_where_it_is_left_out():
    tokenizer = make_tokenizer(THINKING)
    bare = {"role": "assistant", "content": "one"}
    other = {"role": "assistant", "content": "one", "reasoning": "hm"}
    dropping = make_chat(tokenizer)
    assert dropping.meaning(thinking("one")) == dropping.meaning(other) != dropping.meaning(bare)
    keeping = make_chat(tokenizer, keep_reasoning=True)
    assert keeping.meaning(thinking("one")) == keeping.meaning(bare)


def test_a_conversation_is_continued_from_its_longest_turn_with_the_same_settings():
    conversation = Conversation(make_chat(make_tokenizer()))
    messages = [USER, REPLY, RESULT]
    conversation.record([USER], "tools", REPLY, [1, 2], [3, 4])
    conversation.record(messages, "tools", PLAIN, [1, 2, 3, 4, 5], [6])
    turn = conversation.continued([*messages, PLAIN, MORE], "tools")
    assert turn is not None
    assert turn.num_messages == 4 and turn.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    turn = conversation.continued([*messages, {**PLAIN, "content": "edited"}, MORE], "tools")
    assert turn is not None and turn.token_ids.tolist() == [1, 2, 3, 4], "from the turn before"
    assert conversation.continued([*messages, PLAIN, MORE], "other tools") is None
    assert conversation.continued([MORE, REPLY, RESULT], "tools") is None
    assert conversation.continued([USER, REPLY], "tools") is None, "nothing stands behind the turn"
    assert conversation.continued([USER], "tools") is None
    assert conversation.continued([], "tools") is None


def test_of_turns_that_mean_the_same_the_last_is_continued():
    conversation = Conversation(make_chat(make_tokenizer()))
    conversation.record([USER], "", PLAIN, [1, 2], [3])
    conversation.record([USER], "", {**PLAIN, "content": "It is sunny. "}, [1, 2], [4])
    turn = conversation.continued([USER, PLAIN, MORE], "")
    assert turn is not None and turn.token_ids.tolist() == [1, 2, 4]


def test_a_message_with_half_a_character_is_recorded():
    conversation = Conversation(make_chat(make_tokenizer()))
    half = {"role": "user", "content": "\ud83d"}
    conversation.record([half], "", PLAIN, [1], [2])
    assert conversation.continued([half, PLAIN, MORE], "") is not None


def test_what_was_drawn_is_read_as_a_message_without_its_end():
    tokenizer = make_tokenizer()
    chat = make_chat(tokenizer)
    message = chat.read([*chat.tokens(f"Well.{CALL}"), tokenizer.eos_token_id], [WEATHER])
    assert message["content"] == "Well."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris", "day": 2}}
    assert call["type"] == "function" and call["id"] == "call-0"
    assert not chat.has_unread_call(chat.read(chat.tokens("Well."), [WEATHER]))
    without_tools = chat.read(chat.tokens(CALL), [])
    assert without_tools == {"role": "assistant", "content": CALL}
    broken = chat.read(chat.tokens('<tool_call>\n{"name": "weather"'), [WEATHER])
    assert broken == {"role": "assistant", "content": '<tool_call>\n{"name": "weather"'}
    assert chat.has_unread_call(broken)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_calls_are_read_also_as_a_client_assembles_them_from_a_stream(is_streamed: bool):
    tokenizer = make_tokenizer()
    chat = make_chat(tokenizer)
    text = f'Both. {CALL}\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Rome"}}}}\n</tool_call>'
    message = chat.read(
        [*chat.tokens(text), tokenizer.eos_token_id],
        [WEATHER],
        text=text,
        streamed_after=[1, 2] if is_streamed else None,
    )
    assert message["content"].strip() == "Both."
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": {"city": "Paris", "day": 2}},
        {"name": "weather", "arguments": {"city": "Rome"}},
    ]


def test_a_broken_call_is_text_to_a_client_but_a_call_to_one_that_streams():
    """As vLLM answers it; the class way has no stream."""
    chat = make_chat(make_tokenizer())
    text = 'Hm <tool_call>\n{"name": "weather", "arguments": {"city": "Par}\n</tool_call>'
    assert chat.read(chat.tokens(text), [WEATHER], text=text)["content"] == text
    message = chat.read(chat.tokens(text), [WEATHER], text=text, streamed_after=[1])
    assert message["content"] == "Hm "
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Par'}
    empty = chat.read([5], [WEATHER], text="", streamed_after=[1])
    assert empty == {"role": "assistant", "content": ""}


def test_reasoning_is_read_apart_and_arguments_of_the_template_tell_its_parser():
    tokenizer = make_tokenizer(THINKING)
    chat = make_chat(tokenizer, reasoning_parser="qwen3")
    text = "hm, 2\n</think>\n\nTwo."
    drawn = [*chat.tokens(text), tokenizer.eos_token_id]
    message = chat.read(drawn, [])
    assert message["reasoning_content"].strip() == "hm, 2"
    assert message["content"].strip() == "Two."
    streamed = chat.read(drawn, [], text=text, streamed_after=[1, 2])
    assert chat.meaning(streamed) == chat.meaning(message)
    kwargs = {"enable_thinking": False}
    message = chat.read(chat.tokens("Two."), [], template_kwargs=kwargs)
    assert message == {"role": "assistant", "content": "Two."}


def test_a_parser_that_vllm_does_not_have_is_refused():
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=r"multi_turn.format=nonsense .* Take the parsers"):
        make_chat(tokenizer, tool_parser="nonsense")
    with pytest.raises(ValueError, match=r"agent.reasoning_parser=nonsense"):
        make_chat(tokenizer, reasoning_parser="nonsense")


def test_the_tools_are_part_of_a_rendered_text():
    chat = make_chat(make_tokenizer())
    text = chat.render([USER], [WEATHER], is_prompt=True)
    tools = text.partition("system\n")[2].partition("<|im_end|>")[0]
    assert json.loads(tools) == [WEATHER]
    assert text.endswith("<|im_start|>assistant\n")
    assert not chat.render([USER], [], is_prompt=False).endswith("assistant\n")
