"""An endpoint without an engine: tiny tokenizers with chat templates, a model whose answers are
written in the test, and hosts whose user code runs in the test's own process.

The model and the hosts stand in for engines and for processes. The rest is real, HTTP included.
"""

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.endpoint import Endpoint
from verl_like.workers.agents.engine_client import Access
from verl_like.workers.agents.episode import EpisodeSpec
from verl_like.workers.agents.hosts import UserCodeError
from verl_like.workers.agents.session import Limits, Session
from verl_like.workers.config.models import ModelConfig
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
HEADERS = (
    "<|begin|>{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|/head|>\n\n{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
"""Like Llama 3's."""
THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like Qwen3's: reasoning stands only in turns behind the last message of a user."""
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEXT = "the weather in Paris is sunny and the user asked for arguments of a city name tool " * 3
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def make_tokenizer(template: str = CHATML, *, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE with some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in NOT_SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>")
    fast.chat_template = template
    return fast


def make_chat(
    tokenizer: PreTrainedTokenizerFast,
    *,
    tool_parser: str = "hermes",
    reasoning_parser: str | None = None,
    keep_reasoning: bool = False,
) -> ChatFormat:
    return ChatFormat(
        tokenizer,
        {},
        [tokenizer.eos_token_id],
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        keep_reasoning=keep_reasoning,
    )


def save_model(path: Path, tokenizer: PreTrainedTokenizerFast) -> ModelConfig:
    """A folder with the configuration of a model, and without weights."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    ).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return ModelConfig(path=str(path))


class ScriptedModel:
    """A test's stand-in for the engines: what it draws is what `script` returns for a request."""

    def __init__(self, script: Callable[[GenerationRequest], Sequence[int]]) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        """The names of requests that nobody waits for any more."""
        self.is_held = False
        """While it is True, no request is answered."""

    async def complete(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        try:
            while self.is_held:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.append(request.name)
            raise
        drawn = []
        for token in list(self.script(request))[: request.sampling.max_tokens]:
            drawn.append(token)
            if token in request.sampling.stop_token_ids:
                break
        log_probs = np.linspace(-0.25, -0.75, len(drawn))
        middle = (len(drawn) + 1) // 2
        spans = [(7, 0, middle), (8, middle, len(drawn))]
        return Completion(drawn, log_probs, tuple(spans), num_cached_tokens=3)


SAMPLING = Sampling(temperature=0.9, top_k=-1, top_p=0.95, max_tokens=150, stop_token_ids=())
LIMITS = Limits(first_prompt=400, response=900, context=1200, call_timeout_s=30.0)


class Served:
    """An endpoint on an event loop in a thread of its own, as the runner has it."""

    def __init__(self, chat: ChatFormat, model: ModelConfig) -> None:
        self.chat = chat
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.endpoint = Endpoint(chat, model, port=0)
        self.do(self.endpoint.start())
        self.num_episodes = 0

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.do(self.endpoint.close())
        self.loop.call_soon_threadsafe(self.loop.stop)

    def session(self, model: ScriptedModel, limits: Limits = LIMITS) -> Session:
        """A new episode, whose seed is its number."""
        self.num_episodes += 1
        sampling = replace(SAMPLING, stop_token_ids=(self.chat.tokenizer.eos_token_id,))
        name = f"episode {self.num_episodes}"
        request = GenerationRequest(name, [1, 2, 3], self.num_episodes, sampling)
        spec = EpisodeSpec(request, {"number": self.num_episodes})
        return Session(spec, model, limits, name=name)

    def open(self, session: Session) -> Access:
        async def on_the_loop() -> Access:
            return self.endpoint.open(session)

        return self.do(on_the_loop())

    def forget(self, access: Access) -> None:
        async def on_the_loop() -> None:
            self.endpoint.forget(access)

        self.do(on_the_loop())


def split_at_random(chat: ChatFormat, text: str, chance: random.Random) -> list[int]:
    """Tokens of a text that are not those of its encoding, as a model may draw them."""
    tokens: list[int] = []
    while text:
        length = chance.randint(1, 3)
        for added in NOT_SPECIAL:  # pieces of them would be other tokens
            place = text.find(added)
            if place == 0:
                length = len(added)
            elif 0 < place < length:
                length = place
        tokens += chat.tokens(text[:length])
        text = text[length:]
    return tokens


class InProcess:
    """A test's stand-in for `Hosts`: user code is a coroutine function of the test."""

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self.run = run
        self.num_left = 0
        """How many seats were left."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def seat(self) -> "InProcess":
        return self

    async def call(self, method: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        assert method == "run"
        assert timeout_s == 12.5
        try:
            # What crosses to a process is JSON.
            result = await self.run(**json.loads(json.dumps(arguments)))
            return json.loads(json.dumps(result))
        except Exception as error:
            raise UserCodeError(f"{type(error).__name__}: {error}", "") from error

    def leave(self) -> None:
        self.num_left += 1
