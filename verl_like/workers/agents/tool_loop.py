"""Episodes with tools: the model calls them until it calls none, or its environment is done."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_like.workers.agents.chat import ChatFormat, Message
from verl_like.workers.agents.episode import EpisodeFailed, RoomUsedUp
from verl_like.workers.agents.host_process import JsonObject
from verl_like.workers.agents.hosts import Hosts, UserCodeError
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session
from verl_like.workers.agents.turns import ToolCall
from verl_like.workers.config.agent import AgentConfig


class Seat(Protocol):
    """The place of an episode in an environment."""

    @property
    def is_done(self) -> bool:
        """Returns whether the environment has ended the episode."""

    async def call(self, method: str, arguments: JsonObject, timeout_s: float) -> Any:
        """Calls `reset`, a tool or `get_reward`, and returns what it returns. Raises UserCodeError
        if it fails, and EpisodeFailed or Restarted if the environment does."""


@dataclass
class EnvironmentClass:
    """The way of `agent.environment`: a class in host processes, whose methods are the tools."""

    hosts: Hosts
    loop: "ToolLoop"

    async def start(self) -> None:
        await self.hosts.start()

    async def close(self) -> None:
        await self.hosts.close()

    async def run(self, session: Session) -> Outcome:
        seat = await self.hosts.seat()
        failed = True
        try:
            outcome = await self.loop.run(seat, session)
            failed = False
            return outcome
        finally:
            seat.leave(failed)


@dataclass
class ToolLoop:
    """Lets the model act in an environment.

    An episode begins with the dataset's prompt, behind which stands the text that `reset` returns.
    It ends when the model calls no tool, when the environment is done, or when the model's turns or
    room are used up.
    """

    chat: ChatFormat
    tools: Sequence[Mapping[str, Any]]
    """The schemas of the tools."""
    has_reward: bool
    """True if the environment has `get_reward`."""
    max_turns: int | None
    config: AgentConfig

    def __post_init__(self) -> None:
        self.tool_names = {tool["function"]["name"] for tool in self.tools}

    async def run(self, seat: Seat, session: Session) -> Outcome:
        """Runs an episode. Raises EpisodeFailed or Restarted."""
        messages, prompt_ids = await self._begin(seat, session)
        ended = await self._turns(seat, session, messages, prompt_ids)
        reward = None
        if self.has_reward:
            reward = await self._call(seat, "get_reward", {}, self.config.reward_timeout_s)
        return Outcome(reward, ended, is_scored=self.has_reward)

    async def _begin(self, seat: Seat, session: Session) -> tuple[list[Message], list[int]]:
        """Resets the environment, and returns the first messages and their tokens."""
        spec = session.spec
        row = dict(spec.row)
        text = await self._call(seat, "reset", row, self.config.reset_timeout_s)
        messages = list(row["prompt"])
        if text is not None and not isinstance(text, str):
            problem = f"reset returned {text!r:.100}: return None, or text for the prompt"
            raise EpisodeFailed("environment", problem)
        if not text:
            prompt_ids = list(spec.request.prompt_ids)
            return messages, prompt_ids
        last = messages[-1]
        content = f"{last['content']}{text}"
        messages[-1] = {**last, "content": content}
        prompt = self.chat.render(messages, self.tools, is_prompt=True)
        return messages, self.chat.tokens(prompt)

    async def _turns(
        self, seat: Seat, session: Session, messages: list[Message], prompt_ids: list[int]
    ) -> str:
        """Lets the model act until the episode has ended, and returns how it ended."""
        num_turns = 0
        while True:
            try:
                drawn = await session.draw(prompt_ids)
            except RoomUsedUp as error:
                if not num_turns:
                    raise EpisodeFailed("environment", str(error)) from None
                session.counts["room_used_up"] += 1
                return "room"
            num_turns += 1
            if drawn.stop_reason is None:
                session.counts["room_used_up"] += 1
                return "room"
            drawn_ids = drawn.completion.token_ids.tolist()
            reply = self.chat.read(drawn_ids, self.tools)
            calls = reply.get("tool_calls", [])
            if not calls:
                has_unread = self.chat.has_unread_call(reply)
                session.counts["unreadable_calls"] += has_unread
                return "done"
            if num_turns == self.max_turns:
                session.counts["turns_used_up"] += 1
                return "turns"
            messages.append(reply)
            try:
                before = self.chat.render(messages, self.tools, is_prompt=False)
            except Exception:  # a template may raise anything for what a model writes
                session.counts["unreadable_calls"] += 1
                return "done"
            for call in calls:
                function = call["function"]
                used = await self._use_tool(seat, session, function)
                message = {"role": "tool", "name": used.name, "content": used.result}
                messages.append(message)
                if seat.is_done:
                    return "done"
            prompt = self.chat.render(messages, self.tools, is_prompt=True)
            tail = self.chat.tail(prompt, before, drawn_ids)
            if tail is None:
                session.counts["drifted_calls"] += 1
                prompt_ids = self.chat.tokens(prompt)
            else:
                prompt_ids = [*prompt_ids, *drawn_ids, *tail]

    async def _use_tool(
        self, seat: Seat, session: Session, function: Mapping[str, Any]
    ) -> ToolCall:
        """Calls a tool. What the policy did wrong and what the tool raised are told to the
        model."""
        name = function["name"]
        arguments = function["arguments"]
        started = time.monotonic()
        problem = ""
        result: Any = ""
        if name not in self.tool_names:
            session.counts["unknown_tools"] += 1
            problem = f"Tool {name} not found."
        elif not isinstance(arguments, dict):
            session.counts["unreadable_calls"] += 1
            problem = f"The arguments of {name} are no JSON object."
        else:
            try:
                result = await seat.call(name, arguments, self.config.tool_timeout_s)
            except UserCodeError as error:
                session.counts[f"tool_errors/{name}"] += 1
                problem = error.text
        is_error = bool(problem)
        if is_error:
            result = {"error": problem}
        seconds = time.monotonic() - started
        used = ToolCall(name, str(arguments), str(result), seconds, is_error)
        *_, last_turn = session.turns.values()
        last_turn.tool_calls.append(used)
        session.counts["tool_calls"] += 1
        return used

    async def _call(self, seat: Seat, method: str, arguments: JsonObject, timeout_s: float) -> Any:
        """Calls `reset` or `get_reward`. Raises EpisodeFailed if it raises."""
        try:
            return await seat.call(method, arguments, timeout_s)
        except UserCodeError as error:
            raise EpisodeFailed("environment", f"{method} raised {error}") from None
