"""Episodes in an OpenEnv server, by the WebSocket of OpenEnv 0.10."""

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from verl_like.workers.agents.chat import text_of
from verl_like.workers.agents.episode import EpisodeFailed, FailureKind
from verl_like.workers.agents.host_process import JsonObject
from verl_like.workers.agents.hosts import Description, UserCodeError
from verl_like.workers.agents.runner import Outcome, Way
from verl_like.workers.agents.session import Session
from verl_like.workers.agents.tool_loop import ToolLoop

_STEP = "step"
"""The tool that an action schema is. No tool that a server lists has this name."""
_LISTS_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""The titles of the action schemas of servers that list their tools."""
_OF_ENVIRONMENTS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""The codes of errors of an environment. The model is told of those that its actions cause."""
_REFUSALS = (EpisodeFailed, UserCodeError, OSError, HTTPException, WebSocketException, ValueError)
"""What is raised if a server does not answer, or by another protocol."""
_OF_SERVERS: dict[str, FailureKind] = {"timeout": "deadline", "transport_error": "environment"}
"""The types of a tool's errors that the tool did not raise, and which failures they are."""
_CHECK_S = 10.0
_CLOSE_S = 3.0
_PAUSE_S = 0.1


class _Answer(BaseModel):
    """A message of a server."""

    type: str
    data: JsonObject


class _Observation(BaseModel):
    """What an environment answers to a reset or an action."""

    observation: JsonObject
    reward: float | None = None
    done: bool = False


class _Tool(BaseModel):
    """A tool, as servers list it. It is dumped as templates of chats take it."""

    name: str
    description: str
    parameters: JsonObject = Field(alias="input_schema")


class _Schemas(BaseModel):
    """The schemas of a server's messages."""

    action: JsonObject


@dataclass
class OpenEnvServer(Way):
    """The way of `agent.server=openenv://host:port`. An episode is a session of the server, and a
    call of a tool is an action."""

    address: str
    loop: ToolLoop

    async def run(self, session: Session) -> Outcome:
        try:
            async with await self._opened() as connection:
                seat = _Seat(connection, session)
                try:
                    return await self.loop.run(seat, session)
                finally:
                    await _end(connection)
        except (OSError, WebSocketException, ValidationError) as error:
            text = f"the server at {self.address} failed: {error}"
            raise EpisodeFailed("environment", text) from None

    async def _opened(self) -> ClientConnection:
        """Returns a session, which is to be entered. It waits `agent.reset_timeout_s` for a server
        that is not there, such as one that is started again. Raises OSError if none comes."""
        timeout_s = self.loop.config.reset_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await _connect(self.address, timeout_s)
            except OSError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_PAUSE_S)


@dataclass
class _Seat:
    """An episode's session of a server. The reward of an action counts for the turn of the model
    that chose it. An action without a reward counts 0."""

    connection: ClientConnection
    session: Session
    is_done: bool = False
    rewards: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By the numbers of turns, from 1."""

    async def call(self, method: str, arguments: JsonObject, timeout_s: float) -> Any:
        """Returns the text of an observation, or the rewards of all turns."""
        turn = len(self.session.turns)
        if method == "get_reward":
            turns = range(1, turn + 1)
            return [self.rewards[number] for number in turns]
        if method == "reset":
            answer = await _ask(self.connection, "reset", arguments, timeout_s)
        else:
            action = arguments
            if method != _STEP:
                action = {"type": "call_tool", "tool_name": method, "arguments": arguments}
            answer = await _ask(self.connection, "step", action, timeout_s)
        self.is_done = answer.done
        self.rewards[turn] += answer.reward or 0.0
        return _text(answer.observation)


def _connect(address: str, timeout_s: float) -> connect:
    """Returns a session of a server, which is to be awaited or entered. Each of its messages has a
    deadline."""
    return connect(
        f"ws://{address}/ws",
        open_timeout=timeout_s,
        close_timeout=_CLOSE_S,
        ping_interval=None,
        proxy=None,
    )


async def _end(connection: ClientConnection) -> None:
    """Ends a session, and waits until the server has room for another one."""
    with contextlib.suppress(TimeoutError, ConnectionClosed):
        async with asyncio.timeout(_CLOSE_S):
            await connection.send('{"type": "close"}')
            await connection.wait_closed()


async def _ask(
    connection: ClientConnection, kind: str, data: JsonObject, timeout_s: float
) -> _Observation:
    """Sends a message, and returns the answer. Raises UserCodeError if the environment fails in it,
    EpisodeFailed if the server does, and ValidationError for no answer of OpenEnv."""
    try:
        async with asyncio.timeout(timeout_s):
            message = json.dumps({"type": kind, "data": data})
            with contextlib.suppress(ConnectionClosed):  # the server may have said why
                await connection.send(message)
            received = await connection.recv()
            answer = _Answer.model_validate_json(received)
    except TimeoutError:
        raise EpisodeFailed("deadline", f"a {kind} took over {timeout_s:g} s") from None
    if answer.type != "error":
        return _Observation.model_validate(answer.data)
    problem = json.dumps(answer.data)
    if answer.data.get("code") in _OF_ENVIRONMENTS:
        raise UserCodeError(problem)
    raise EpisodeFailed("environment", f"a {kind} failed: {problem}")


def _text(observation: JsonObject) -> str:
    """Returns what the model reads of an observation: the result of a listed tool, its only field,
    or all fields as JSON. Raises UserCodeError if a listed tool failed, and EpisodeFailed if that
    is not the tool's."""
    fields = dict(observation)
    fields.pop("metadata", None)
    value: Any = fields or ""
    if "tool_name" in fields:
        error = fields.get("error")
        problem = json.dumps(error)
        kind = None
        if isinstance(error, dict):
            error_type = str(error.get("error_type"))
            kind = _OF_SERVERS.get(error_type)
        if kind:
            raise EpisodeFailed(kind, f"a tool failed: {problem}")
        if error:
            raise UserCodeError(problem)
        value = fields.get("result")
    elif len(fields) == 1:
        [value] = fields.values()
    if isinstance(value, dict) and "content" in value:
        value = text_of(value["content"])
    if isinstance(value, str):
        return value
    return json.dumps(value)


def describe_openenv(address: str) -> Description:
    """Returns the tools of a server. Raises ValueError if none answers, or if its protocol is
    another one. The event loop runs in a thread, because a notebook has one in the main thread."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(asyncio.run, _tools(address))
        try:
            tools = asked.result(3 * _CHECK_S)
        except _REFUSALS as error:
            raise ValueError(
                f"agent.server=openenv://{address} does not answer as OpenEnv 0.10 does: {error}. "
                "Start it with what scripts/agents_environment.sh openenv installs"
            ) from error
    schemas = [{"type": "function", "function": tool.model_dump()} for tool in tools]
    return Description(tools=schemas, has_reward=True)


async def _tools(address: str) -> list[_Tool]:
    """Returns the tools that a server lists, or its action schema as one."""
    schema = await asyncio.to_thread(_action_schema, address)
    title = schema.pop("title", "")
    description = schema.pop("description", "")
    fields = schema.get("properties", {})
    fields.pop("metadata", None)  # which each action has
    tools = [{"name": _STEP, "description": description, "input_schema": schema}]
    async with _connect(address, _CHECK_S) as connection:
        if title in _LISTS_TOOLS:
            answer = await _ask(connection, "step", {"type": "list_tools"}, _CHECK_S)
            tools = answer.observation.get("tools", [])
    if not tools:
        raise ValueError("it has no tools")
    return [_Tool.model_validate(tool) for tool in tools]


def _action_schema(address: str) -> JsonObject:
    """Returns the schema of the actions of a server."""
    with contextlib.closing(HTTPConnection(address, timeout=_CHECK_S)) as connection:
        connection.request("GET", "/schema")
        reply = connection.getresponse().read()
    return _Schemas.model_validate_json(reply).action
