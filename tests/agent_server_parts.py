"""What tests of environment servers share: a chat whose tokens are bytes, models whose answers are
written in the test, and a stand-in for the endpoint.

The stand-in answers chats over HTTP with messages that are written in the test. The session of the
episode draws a token for each, so that the calls are recorded."""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.episode import EpisodeFailed, EpisodeSpec
from verl_like.workers.agents.session import Limits, Session
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling

TEMPLATE = (
    "{% if tools %}<|start|>system {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)


END_TOKEN = 257
"""The token `<|end|>`, behind 256 bytes and `<|start|>`."""


def make_chat() -> ChatFormat:
    """Tokens are bytes, and the marks of the template. Tools are called as hermes does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return ChatFormat(
        fast,
        {},
        [fast.eos_token_id],
        tool_parser="hermes",
        reasoning_parser=None,
        keep_reasoning=False,
    )


def call_text(name: str, **arguments: Any) -> str:
    """How the model writes a call of a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class WritingModel:
    """A test's stand-in for the engines: it writes given texts, one after the other."""

    def __init__(self, chat: ChatFormat, *texts: str) -> None:
        self.chat = chat
        self.texts = list(texts)
        self.prompts: list[str] = []

    async def complete(self, request: GenerationRequest) -> Completion:
        self.prompts.append(self.chat.tokenizer.decode(request.prompt_ids))
        token_ids = self.chat.tokens(f"{self.texts.pop(0)}<|end|>")
        return Completion(token_ids, [-0.5] * len(token_ids), ((3, 0, len(token_ids)),))


class OneTokenModel:
    """A test's stand-in for the engines: it draws the token 9, which ends a response."""

    async def complete(self, request: GenerationRequest) -> Completion:
        return Completion([9], [-0.5], ((3, 0, 1),))


def session_of(model: Any, row: Mapping[str, Any], prompt_ids: Sequence[int] = (1, 2)) -> Session:
    """The first attempt at an episode of a row of the dataset."""
    sampling = Sampling(
        temperature=0.7, top_k=-1, top_p=1.0, max_tokens=900, stop_token_ids=(9, END_TOKEN)
    )
    request = GenerationRequest("row 0, sample 1", list(prompt_ids), seed=77, sampling=sampling)
    limits = Limits(first_prompt=900, response=900, context=1800, call_timeout_s=5.0)
    spec = EpisodeSpec(request, row)
    return Session(spec, model, limits, name="an attempt")


Answer = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]


@dataclass
class Access:
    session: Session
    base_url: str
    failure: EpisodeFailed | None = None


@dataclass
class StandInEndpoint:
    """Has the methods of the endpoint that the ways use."""

    answer: Answer
    """The model's message to the messages of a chat."""
    api_key: str = "the key of the run"
    chats: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of all requests."""
    is_closed: bool = False
    is_held: bool = False
    """While it is True, no request is answered."""
    accesses: dict[str, Access] = field(default_factory=dict)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/s/{secret}/v1/chat/completions", self.reply)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        [(_host, self.port)] = self.runner.addresses

    async def close(self) -> None:
        await self.runner.cleanup()
        self.is_closed = True

    def open(self, session: Session) -> Access:
        secret = secrets.token_urlsafe()
        access = Access(session, f"http://127.0.0.1:{self.port}/s/{secret}/v1")
        self.accesses[secret] = access
        return access

    def forget(self, access: Access) -> None:
        secret = access.base_url.split("/")[-2]
        del self.accesses[secret]

    async def reply(self, request: web.Request) -> web.StreamResponse:
        keys = (request.headers.get("Authorization"), request.headers.get("x-api-key"))
        if keys[0] != f"Bearer {self.api_key}" and keys[1] != self.api_key:
            return web.json_response({"error": {"message": "a wrong key"}}, status=401)
        access = self.accesses.get(request.match_info["secret"])
        if access is None:
            return web.json_response({"error": {"message": "no such episode"}}, status=403)
        body = await request.json()
        self.chats.append(body)
        while self.is_held:
            await asyncio.sleep(0.01)
        turns = access.session.turns
        drawn = sum(turn.num_drawn for turn in turns.values())
        await access.session.draw([1, 2, *range(100, 100 + len(turns) + drawn)])
        message = {"role": "assistant", **self.answer(body["messages"])}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        reply = {"id": "chat-1", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            reply |= {"object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(reply)
        for number, call in enumerate(message.get("tool_calls", [])):
            call["index"] = number
        reply["object"] = "chat.completion.chunk"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, end in ((message, None), ({}, reason)):
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            await response.write(f"data: {json.dumps(reply | {'choices': [choice]})}\n\n".encode())
        await response.write(
            f"data: {json.dumps(reply | {'choices': [], 'usage': usage})}\n\n".encode()
        )
        await response.write(b"data: [DONE]\n\n")
        return response
