"""Renders messages as tokens: anew, or behind the tokens that an episode has drawn already."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_like.workers.agents.episode import TokenIds

Message = Mapping[str, Any]
Meaning = tuple[Any, ...]


class ChatFormat:
    """How a model reads messages and writes tool calls.

    Messages are rendered by the chat template of the tokenizer, and what the model writes is read
    by vLLM's parsers. Raises ValueError for a parser that vLLM does not have.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        end_token_ids: TokenIds,
        *,
        tool_parser: str,
        reasoning_parser: str | None,
        keep_reasoning: bool,
    ) -> None:
        # Parsers log a traceback for each tool call that is no JSON. vLLM reads this once.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        from vllm.tokenizers.hf import get_cached_tokenizer

        self.tokenizer: Any = get_cached_tokenizer(tokenizer)  # each parser asks for its vocabulary
        self.template_kwargs = template_kwargs
        self.end_texts = {token: tokenizer.decode([token]) for token in end_token_ids}
        """The texts of the tokens that end a turn, by the tokens."""
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.keep_reasoning = keep_reasoning
        self.parser_class = self._parser_class()
        self._request_is_of: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._request: Any = None
        """The last request that parsers were given, which they do not change. Above are its tools
        and the arguments of its chat template."""

    def _parser_class(self) -> Any:
        from vllm.parser import ParserManager

        try:
            return ParserManager.get_parser(
                tool_parser_name=self.tool_parser,
                reasoning_parser_name=self.reasoning_parser,
                enable_auto_tools=True,
                tokenizer=self.tokenizer,
            )
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"actor_rollout_ref.rollout.multi_turn.format={self.tool_parser} with "
                f"agent.reasoning_parser={self.reasoning_parser} does not work with this "
                f"tokenizer: {error}. Take the parsers that vLLM's documentation names for the "
                "model"
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
        """Returns the tokens of a rendered text. The template has written the special ones.

        Half a surrogate pair, which a model may write in JSON, has none: "?" stands for it.
        """
        whole = text.encode(errors="replace").decode()
        return self.tokenizer.encode(whole, add_special_tokens=False)

    def read(
        self,
        token_ids: TokenIds,
        tools: Sequence[Any],
        *,
        text: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        streamed_after: list[int] | None = None,
    ) -> dict[str, Any]:
        """Returns the message that a model has written, with its tool calls.

        Their arguments are a dict, or the text itself if it is no JSON object.

        Args:
            text: what a server has made of the tokens. None means their text without the end.
            template_kwargs: arguments of the chat template, at which some parsers look, other than
                those of the configuration.
            streamed_after: the tokens of the prompt, if a client assembles the message from what
                vLLM streams. vLLM reads streams in another way.
        """
        kwargs = template_kwargs or self.template_kwargs
        request = self._request_with(tools, kwargs)
        parser = self._parser(request, kwargs)
        drawn_ids = list(token_ids)
        if text is None:
            ids = drawn_ids
            if ids and ids[-1] in self.end_texts:
                ids = ids[:-1]
            skips = request.skip_special_tokens
            text = self.tokenizer.decode(ids, skip_special_tokens=skips)
        try:
            if streamed_after is None:
                reasoning, content, calls = parser.parse(text, request, True, drawn_ids)
            else:
                delta = parser.parse_delta(text, drawn_ids, request, streamed_after, finished=True)
                reasoning, content, calls = _assembled(delta)
        except Exception:  # a parser may raise anything for what a model writes
            reasoning = None
            content = text
            calls = []
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = _tool_calls(calls)
        return message

    def _request_with(self, tools: Sequence[Any], template_kwargs: Mapping[str, Any]) -> Any:
        """Returns a request to vLLM's server with these tools, as a parser adjusts it. To make one
        takes longer than to parse, and the arguments are mostly the same."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        is_of = (tools, template_kwargs)
        if is_of != self._request_is_of:
            fields = {"messages": [], "tools": list(tools) or None}
            request = ChatCompletionRequest.model_validate(fields)
            parser = self._parser(request, template_kwargs)
            self._request = parser.adjust_request(request)
            self._request_is_of = is_of
        return self._request

    def _parser(self, request: Any, template_kwargs: Mapping[str, Any]) -> Any:
        """Returns a new parser, which reads one message."""
        kwargs = {"chat_template_kwargs": template_kwargs}
        return self.parser_class(self.tokenizer, request.tools, **kwargs)

    def has_unread_call(self, message: Message) -> bool:
        """Returns whether a message without tool calls looks as if it had one, such as one that is
        no JSON."""
        reads_calls = self.parser_class.tool_parser_cls
        start = getattr(reads_calls, "tool_call_start_token", "")
        return bool(start) and start in message["content"]

    def tail(self, prompt: str, before: str, token_ids: TokenIds) -> list[int] | None:
        """Returns the tokens that a prompt has behind a turn that was drawn.

        The token that ends the turn is among them only if it was not drawn. Returns None if the
        template does not extend its earlier text.

        Args:
            prompt: the text of all messages, which the model is to answer.
            before: the text of the messages up to the turn and with it.
            token_ids: the tokens of the turn, or of all up to it and with it.
        """
        ends = [text for text in self.end_texts.values() if text in before]
        end = max(ends, key=before.rfind, default="")
        place = before.rfind(end) + len(end)
        behind_turn = before[place:]
        if behind_turn.strip():  # the template ends no turn with such a token
            end = ""
            place = len(before)
        if prompt.startswith(before):
            rest = prompt[place:]
        elif end and self.keep_reasoning:
            # The template leaves reasoning out of earlier turns. As many turns end before this one.
            num_ends = before.count(end)
            *ended, rest = prompt.split(end, num_ends)
            if len(ended) < num_ends:
                return None
        else:
            return None
        drawn_end = self.end_texts.get(token_ids[-1])
        if drawn_end != end:
            rest = end + rest
        return self.tokens(rest)

    def meaning(self, message: Message) -> Meaning:
        """Returns what messages that mean the same have in common: role, text, tool calls with
        parsed arguments, and reasoning unless `keep_reasoning` is set.

        Arguments that are no JSON object count as none, because vLLM leaves them out of a prompt.
        """
        calls = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            name = function["name"]
            arguments = arguments_of(function.get("arguments"))
            if not isinstance(arguments, dict):
                arguments = {}
            text = json.dumps(arguments, sort_keys=True)
            calls.append((name, text))
        reasoning = ""
        if not self.keep_reasoning:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        role = message["role"]
        content = text_of(message.get("content"))
        return role, content.strip(), tuple(calls), reasoning.strip()


def _tool_calls(calls: Sequence[Any]) -> list[Message]:
    """Returns the tool calls of a message from those that a parser has read."""
    tool_calls: list[Message] = []
    for number, call in enumerate(calls):
        arguments = arguments_of(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        tool_call = {"id": f"call-{number}", "type": "function", "function": function}
        tool_calls.append(tool_call)
    return tool_calls


def _assembled(delta: Any) -> tuple[str | None, str | None, list[Any]]:
    """Returns the reasoning, the text and the calls of what vLLM streams of a whole message."""
    if delta is None:
        return None, None, []
    calls: dict[int, Any] = {}
    for part in delta.tool_calls:
        new = part.function
        call = calls.setdefault(part.index, new)
        if call is not new:
            before = call.arguments or ""
            call.arguments = before + new.arguments
    return delta.reasoning, delta.content, list(calls.values())


def arguments_of(arguments: Any) -> Any:
    """Returns the arguments of a tool call as a dict, or as they are if they are no JSON object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(parsed, dict):
        return parsed
    return arguments


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts."""
    if not isinstance(content, list):
        return content or ""
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(str(part.get("text") or "") for part in parts)


@dataclass(frozen=True, eq=False)
class RecordedTurn:
    """A turn of an episode whose messages are known."""

    num_messages: int
    """How many messages its prompt and its reply are."""
    token_ids: np.ndarray
    """Of its prompt and its reply, int32."""


@dataclass
class Conversation:
    """The turns of one episode, by which later prompts are continued."""

    chat: ChatFormat
    _turns: dict[bytes, RecordedTurn] = field(default_factory=dict)
    """By what stands for the meaning of their messages. Of equal ones it has the last."""

    def record(
        self,
        messages: Sequence[Message],
        settings: str,
        reply: Message,
        prompt_ids: TokenIds,
        drawn_ids: TokenIds,
    ) -> None:
        """Records a turn.

        Args:
            settings: the tools and the other arguments of the chat template, as a text.
        """
        whole = [*messages, reply]
        key = self._keys(whole, settings)[-1]
        token_ids = np.array([*prompt_ids, *drawn_ids], np.int32)
        self._turns[key] = RecordedTurn(len(whole), token_ids)

    def continued(self, messages: Sequence[Message], settings: str) -> RecordedTurn | None:
        """Returns the longest turn that these messages continue: they begin with those of its
        prompt and with its reply, or with what means the same, and have more behind them."""
        keys = self._keys(messages[:-1], settings)
        for key in reversed(keys):
            if key in self._turns:
                return self._turns[key]
        return None

    def _keys(self, messages: Sequence[Message], settings: str) -> list[bytes]:
        """Returns for each message a digest of what it and those before it mean."""
        digest = hashlib.blake2b(settings.encode(), digest_size=16)
        keys = []
        for message in messages:
            meaning = self.chat.meaning(message)
            digest.update(repr(meaning).encode())
            keys.append(digest.digest())
        return keys
