"""What vLLM's server takes for its engine: it asks the episode that a request belongs to."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from verl_like.workers.agents.chat import ChatFormat, Conversation, Message
from verl_like.workers.agents.episode import EpisodeFailed, Reward, RoomUsedUp, TokenIds
from verl_like.workers.agents.session import Drawn, Session

ENDED = "This episode has ended, and with it the access to its model."


class Access:
    """A harness's access to the model in one attempt at an episode."""

    def __init__(self, session: Session, chat: ChatFormat, address: str) -> None:
        """Args:
        address: where the endpoint is.
        """
        self.session = session
        self.conversation = Conversation(chat)
        self.secret = secrets.token_urlsafe(32)
        self.base_url = f"{address}/s/{self.secret}/v1"
        """The address of this episode alone, for clients that are made for OpenAI's."""
        self.reward: Reward = None
        """What was posted to the reward route."""
        self.reward_problem = ""
        """Why the last of what was posted there is no reward."""
        self.failure: EpisodeFailed | None = None
        """Why the model did not answer, if that is not the policy's failure."""
        self.is_closed = False
        self._draws: set[asyncio.Task[Drawn]] = set()

    def check(self, prompt_ids: TokenIds) -> None:
        """Raises ValueError if the episode has ended, or RoomUsedUp if there is no room behind a
        prompt. That counts, unless it is the first prompt, which is not the policy's."""
        if self.is_closed:
            raise ValueError(ENDED)
        try:
            self.session.check_room(prompt_ids)
        except RoomUsedUp:
            if self.session.turns:
                self.session.counts["room_used_up"] += 1
            raise

    async def draw(self, prompt_ids: TokenIds, **limits: Any) -> Drawn:
        """Calls the model, see `Session.draw`. Raises ValueError if the episode has ended, or ends
        meanwhile."""
        if self.is_closed:
            raise ValueError(ENDED)
        draw = asyncio.create_task(self.session.draw(prompt_ids, **limits))
        self._draws.add(draw)
        try:
            return await draw
        except EpisodeFailed as failure:
            self.failure = failure
            self.close()
            raise ValueError(ENDED) from failure  # after other errors a client tries again
        except asyncio.CancelledError:
            if not self.is_closed:  # the client has gone
                raise
            raise ValueError(ENDED) from None
        finally:
            self._draws.discard(draw)

    def close(self) -> None:
        """Ends the access, also of requests that wait."""
        self.is_closed = True
        for draw in self._draws:
            draw.cancel()


@dataclass
class Call:
    """A request to the server."""

    access: Access
    messages: Sequence[Message] | None = None
    """The messages of its prompt. None if the prompt is a text or tokens."""
    params: Any = None
    """How vLLM renders them."""
    settings: str = ""
    """The tools and the other arguments of the chat template."""


current_call: ContextVar[Call] = ContextVar("current_call")
"""The request that the running task answers."""


class EngineClient:
    """Has those parts of vLLM's `EngineClient` by which its server generates.

    The server's renderer is wrapped: where messages continue what was recorded of the episode, the
    prompt is the recorded tokens and the rendered tail.
    """

    errored = False
    input_processor = None

    def __init__(self, vllm_config: Any, renderer: Any, chat: ChatFormat) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.chat = chat
        self.renderer = renderer
        self._render = renderer.render_messages_async
        renderer.render_messages_async = self.render_messages

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admits every request: the runner bounds the number of episodes."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def render_messages(self, messages: list[Any], params: Any) -> tuple[Any, Any]:
        """Returns messages as the template gets them, and the tokens of their prompt.

        Raises ValueError or RoomUsedUp, before a stream begins.
        """
        conversation, prompt = await self._render(messages, params)
        call = current_call.get()
        call.messages = conversation
        call.params = params
        kwargs = params.chat_template_kwargs
        call.settings = json.dumps(kwargs, sort_keys=True, default=str)
        prompt_ids = await self._continued(call, prompt["prompt"])
        call.access.check(prompt_ids)
        return conversation, {"prompt_token_ids": prompt_ids}

    async def _continued(self, call: Call, text: str) -> list[int]:
        """Returns the tokens of a call's prompt, behind those of the turn that it continues."""
        assert call.messages is not None
        access = call.access
        turn = access.conversation.continued(call.messages, call.settings)
        if turn is None:
            return self.chat.tokens(text)
        kwargs = {
            **call.params.chat_template_kwargs,
            "add_generation_prompt": False,
            "continue_final_message": False,
        }
        params = replace(call.params, chat_template_kwargs=kwargs)
        messages = call.messages[: turn.num_messages]
        _, before = await self._render(messages, params)
        token_ids: list[int] = turn.token_ids.tolist()
        tail = self.chat.tail(text, before["prompt"], token_ids)
        if tail is not None:
            return token_ids + tail
        access.session.counts["drifted_calls"] += 1
        return self.chat.tokens(text)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_unused: Any
    ) -> AsyncIterator[Any]:
        """Yields what is drawn behind a prompt, once, when it is complete.

        Of the parameters those count that say where the response ends and how its text is made.
        Raises ValueError or RoomUsedUp at once, before a stream begins.
        """
        call = current_call.get()
        prompt_ids = prompt["prompt_token_ids"]
        stop_token_ids = sampling_params.stop_token_ids or ()
        self.renderer.validate_token_ids([*prompt_ids, *stop_token_ids])
        call.access.check(prompt_ids)
        return self._outputs(call, prompt_ids, sampling_params, request_id)

    async def _outputs(
        self, call: Call, prompt_ids: list[int], params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        # The text is as vLLM's engine writes it, without what ended the response.
        params.min_tokens = 0  # it would not look for that among the first tokens
        request = EngineCoreRequest("", prompt_ids, None, params, None, 0.0, None, None, None)
        tokenizer = None
        if params.detokenize:
            tokenizer = self.renderer.tokenizer
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

        def find_stop(token_ids: list[int], is_ended: bool) -> tuple[int, str | None]:
            text = detokenizer.update(token_ids, is_ended)
            return detokenizer.num_output_tokens(), text

        drawn = await call.access.draw(
            prompt_ids,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids or (),
            find_stop=find_stop,
        )
        completion = drawn.completion
        drawn_ids = completion.token_ids.tolist()
        text = detokenizer.get_next_output_text(finished=True, delta=False)
        self._record(call, prompt_ids, drawn_ids, text, params)
        log_probs = None
        if params.logprobs is not None:
            values = completion.log_probs.tolist()
            pairs = zip(drawn_ids, values, strict=True)
            log_probs = [{token: Logprob(value)} for token, value in pairs]
        finish_reason = "stop"
        if drawn.stop_reason is None:
            finish_reason = "length"
        versions = [
            WeightVersionSpan(str(version), start, end)
            for version, start, end in completion.versions
        ]
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=drawn_ids,
            cumulative_logprob=None,
            logprobs=log_probs,
            finish_reason=finish_reason,
            stop_reason=drawn.stop_reason,
            weight_versions=versions,
        )
        # As there is one output, it is the same for each `output_kind`.
        yield RequestOutput(
            request_id,
            None,
            prompt_ids,
            prompt_logprobs=None,
            outputs=[output],
            finished=True,
            num_cached_tokens=completion.num_cached_tokens,
        )

    def _record(
        self, call: Call, prompt_ids: list[int], drawn_ids: list[int], text: str, params: Any
    ) -> None:
        """Records a turn with messages, and with the reply that the client gets. `params` are the
        sampling parameters, and `call.params` say how the messages were rendered."""
        from vllm.sampling_params import RequestOutputKind

        if call.messages is None:
            return
        kwargs = call.params.chat_template_kwargs
        tools = kwargs.get("tools") or ()
        if call.params.tool_choice == "none":
            tools = ()
        streamed_after = None
        if params.output_kind == RequestOutputKind.DELTA:
            streamed_after = prompt_ids
        reply = self.chat.read(
            drawn_ids, tools, text=text, template_kwargs=kwargs, streamed_after=streamed_after
        )
        conversation = call.access.conversation
        conversation.record(call.messages, call.settings, reply, prompt_ids, drawn_ids)
