"""Renders messages as tokens: anew, or behind the tokens that an episode has drawn already."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Meaning = tuple[Any, ...]


class ChatFormat:
    """How a model reads messages and writes tool calls.

    Messages are rendered by the chat template of the tokenizer, and what the model writes is read
    by vLLM's parsers. Raises ValueError for a parser that vLLM does not have.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        end_token_ids: Sequence[int],
        *,
        tool_parser: str,
        reasoning_parser: str | None,
        keep_reasoning: bool,
    ) -> None:
        from vllm.parser import ParserManager

        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.end_texts = [tokenizer.decode([token]) for token in end_token_ids]
        """The texts of the tokens that end a turn."""
        self.keep_reasoning = keep_reasoning
        try:
            self.parser_class = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=True,
                tokenizer=tokenizer,
            )
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"actor_rollout_ref.rollout.multi_turn.format={tool_parser} with "
                f"agent.reasoning_parser={reasoning_parser} does not work with this tokenizer: "
                f"{error}. Take the parsers that vLLM's documentation names for the model"
            ) from error

    def render(self, messages: Sequence[Message], tools: Sequence[Any], *, is_prompt: bool) -> str:
        """Returns the text of messages. With `is_prompt` the model is to answer them."""
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=is_prompt,
            **self.template_kwargs,
        )

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a rendered text. The template has written the special ones."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, token_ids: Sequence[int], tools: Sequence[Any]) -> dict[str, Any]:
        """Returns the message that a model has written, with its tool calls.

        Their arguments are a dict, or the text itself if it is no JSON object.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request: Any = ChatCompletionRequest(messages=[], tools=list(tools) or None)
        parser = self.parser_class(self.tokenizer, request.tools)
        request = parser.adjust_request(request)
        text = self.tokenizer.decode(
            self.without_end(token_ids), skip_special_tokens=request.skip_special_tokens
        )
        reasoning, content, calls = parser.parse(text, request, True, list(token_ids))
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_of(call.arguments)},
                }
                for number, call in enumerate(calls)
            ]
        return message

    def has_unread_call(self, message: Message) -> bool:
        """Returns whether a message without tool calls looks as if it had one, such as one that is
        no JSON."""
        start = getattr(self.parser_class.tool_parser_cls, "tool_call_start_token", "")
        return bool(start) and start in message["content"]

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens of a turn without the one that ends it."""
        kept = list(token_ids)
        if kept and self.tokenizer.decode([kept[-1]]) in self.end_texts:
            kept.pop()
        return kept

    def tail(self, prompt: str, before: str, drawn_ids: Sequence[int]) -> list[int] | None:
        """Returns the tokens that a prompt has behind a turn that was drawn.

        The token that ends the turn is among them only if it was not drawn. Returns None if the
        template does not extend its earlier text.

        Args:
            prompt: the text of all messages, which the model is to answer.
            before: the text of the messages up to the turn and with it.
            drawn_ids: the tokens of the turn.
        """
        ends = [text for text in self.end_texts if text in before]
        end = max(ends, key=before.rfind, default="")
        place = before.rfind(end)
        behind_turn = before[place + len(end) :]
        if behind_turn.strip():  # the template ends no turn with such a token
            end = ""
            place = len(before)
        if prompt.startswith(before):
            place_in_prompt = place
        elif end and self.keep_reasoning:
            # The template leaves reasoning out of earlier turns. As many turns end before this one.
            place_in_prompt = _place_of(end, prompt, before.count(end))
        else:
            return None
        if place_in_prompt < 0:
            return None
        is_ended = self.tokenizer.decode([drawn_ids[-1]]) == end
        start = place_in_prompt + len(end) if is_ended else place_in_prompt
        return self.tokens(prompt[start:])

    def meaning(self, message: Message) -> Meaning:
        """Returns what messages that mean the same have in common: role, text, tool calls with
        parsed arguments, and reasoning unless `keep_reasoning` is set."""
        calls = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments = arguments_of(function["arguments"])
            calls.append((function["name"], json.dumps(arguments, sort_keys=True)))
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if self.keep_reasoning:
            reasoning = ""
        content = text_of(message.get("content"))
        return message["role"], content.strip(), tuple(calls), reasoning.strip()


def _place_of(text: str, whole: str, number: int) -> int:
    """Returns the place of the `number`-th occurrence of a text, or -1."""
    place = -1
    for _ in range(number):
        place = whole.find(text, place + 1)
        if place < 0:
            break
    return place


def arguments_of(arguments: Any) -> Any:
    """Returns the arguments of a tool call as a dict, or as they are if they are no JSON object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        texts = [part.get("text") or "" for part in content if isinstance(part, dict)]
        return "".join(texts)
    return content or ""


@dataclass(frozen=True)
class RecordedTurn:
    """A turn of an episode whose messages are known."""

    meanings: tuple[Meaning, ...]
    """Of the messages of its prompt, and of the reply."""
    settings: str
    """The tools and other arguments of the template."""
    token_ids: tuple[int, ...]
    """Of its prompt and its reply."""
    drawn_ids: tuple[int, ...]
    """Of its reply."""


class Conversation:
    """The turns of one episode, by which later prompts are continued."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.turns: list[RecordedTurn] = []

    def record(
        self,
        messages: Sequence[Message],
        settings: str,
        reply: Message,
        prompt_ids: Sequence[int],
        drawn_ids: Sequence[int],
    ) -> None:
        """Records a turn."""
        meanings = tuple(self.chat.meaning(message) for message in [*messages, reply])
        token_ids = (*prompt_ids, *drawn_ids)
        self.turns.append(RecordedTurn(meanings, settings, token_ids, tuple(drawn_ids)))

    def continued(self, messages: Sequence[Message], settings: str) -> RecordedTurn | None:
        """Returns the longest turn that these messages continue: they begin with those of its
        prompt and with its reply, or with what means the same."""
        meanings = tuple(self.chat.meaning(message) for message in messages)
        longest = None
        for turn in self.turns:
            length = len(turn.meanings)
            continues = length < len(meanings) and meanings[:length] == turn.meanings
            is_longer = longest is None or length >= len(longest.meanings)
            if continues and turn.settings == settings and is_longer:
                longest = turn
        return longest
