"""Episodes in a verifiers server, by the wire of ZMQ that the EnvServer of verifiers 0.4.0 has."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from pydantic import BaseModel, ValidationError
from zmq.utils.monitor import recv_monitor_message

from verl_like.workers.agents.endpoint import MODEL_NAME, Endpoint, without_secrets
from verl_like.workers.agents.episode import EpisodeFailed, Reward, RewardProblem
from verl_like.workers.agents.host_process import JsonObject
from verl_like.workers.agents.hosts import Description
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session

RECORD_VERSION = 1
_FIX = "serve the environment with verifiers 0.4.0, see scripts/agents_environment.sh"
_KEY_VARIABLE = "VERL_LIKE_AGENT_KEY"
"""The variable in which verifiers looks for a key. It gets the key in headers instead."""
_PING_MS = 5_000
_SILENCE_MS = 20_000
_LINGER_MS = 1_000
_CHECK_MS = 5_000
_PAUSE_S = 0.1


class _Error(BaseModel):
    type: str
    message: str


class _Head(BaseModel):
    """What is said of a whole episode."""

    ok: bool
    errors: list[_Error]


class _Answer(BaseModel):
    """What is new in the record of an agent, or the end of an episode."""

    trace: str = ""
    """The name of the record."""
    open: JsonObject = {}
    set: JsonObject = {}
    errors: list[_Error] = []
    head: _Head | None = None
    error: str | None = None
    """Why there is no head."""


class _Reward(BaseModel):
    score: float
    weight: float


class _Record(BaseModel):
    """What is read of the record of an agent."""

    rewards: dict[str, _Reward | None] = {}
    is_timeout: bool = False


@dataclass
class VerifiersServer:
    """The way of `agent.server=verifiers://host:port`. A harness of the server calls the model at
    our endpoint, and the reward is that of its record."""

    address: str
    endpoint: Endpoint
    timeout_s: float
    """How long an episode waits for a server that is not there."""
    parts: dict[bytes, asyncio.Queue[list[bytes]]] = field(default_factory=dict)
    """The parts of answers, by the names of requests. No parts mean that the server has gone."""
    _is_connected = False

    async def start(self) -> None:
        await self.endpoint.start()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._socket.connect(f"tcp://{self.address}")
        work = (self._receive(), self._watch())
        self._tasks = [asyncio.create_task(each) for each in work]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=_LINGER_MS)
        await self.endpoint.close()

    async def run(self, session: Session) -> Outcome:
        access = self.endpoint.open(session)
        key = self.endpoint.api_key
        request = {
            "task_data": dict(session.spec.row),
            "client": {
                "type": "eval",
                "base_url": access.base_url,
                "api_key_var": _KEY_VARIABLE,
                # verifiers overwrites the one that its harness's protocol has.
                "headers": {"Authorization": f"Bearer {key}", "x-api-key": key},
            },
            "model": MODEL_NAME,
            "sampling": {},
        }
        problem = None
        reward: Reward = 0.0
        try:
            reward = await self._reward(request)
        except EpisodeFailed as failure:
            text = without_secrets(str(failure), access.base_url, key)
            problem = EpisodeFailed(failure.kind, text)
        finally:
            self.endpoint.forget(access)
        if access.failure is not None:
            raise access.failure
        if session.counts["room_used_up"]:
            return Outcome(reward, "room")
        if problem is not None:
            raise problem
        return Outcome(reward)

    async def _reward(self, request: JsonObject) -> Reward:
        """Lets the server run an episode, and returns its reward. Raises EpisodeFailed if it
        fails."""
        await self._connected()
        name = uuid.uuid4().hex
        parts: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.parts[name.encode()] = parts
        self._send(name, b"run", request)
        answers: list[_Answer] = []
        kind = b""
        try:
            while kind != b"reply":
                kind, content = opened(await parts.get())
                answers.append(_Answer.model_validate(content))
        finally:
            del self.parts[name.encode()]
            # The server ends the episode if it has not ended.
            self._send(uuid.uuid4().hex, b"cancel", {"request_id": name})
        return reward_of(answers)

    async def _connected(self) -> None:
        """Waits for the server. Raises EpisodeFailed if it does not come."""
        try:
            async with asyncio.timeout(self.timeout_s):
                while not self._is_connected:
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise EpisodeFailed("environment", f"no server answers at {self.address}") from None

    def _send(self, name: str, method: bytes, content: JsonObject) -> None:
        packed = msgpack.packb(content)
        self._socket.send_multipart([name.encode(), method, packed])

    async def _receive(self) -> None:
        """Gives answers to those who wait for them."""
        while True:
            name, *parts = await self._socket.recv_multipart()
            if name in self.parts:
                self.parts[name].put_nowait(parts)

    async def _watch(self) -> None:
        """Tells those who wait when the server comes and goes."""
        while True:
            event = await recv_monitor_message(self._monitor)
            self._is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                continue
            for parts in self.parts.values():
                parts.put_nowait([])


def opened(parts: Sequence[bytes]) -> tuple[bytes, Any]:
    """Returns the kind and the content of an answer, which are its parts. Raises EpisodeFailed if
    the server has gone, and ValueError if its wire is another one."""
    if not parts:
        raise EpisodeFailed("environment", "the connection to the server ended")
    if len(parts) != 2:
        raise ValueError(f"the server's answers have {len(parts)} parts instead of 2: {_FIX}")
    kind, content = parts
    return kind, msgpack.unpackb(content, strict_map_key=False)


def reward_of(answers: Sequence[_Answer]) -> Reward:
    """Returns the reward of an episode that has ended: the sum of its weighted scores, or None if
    the server gave no score.

    Raises EpisodeFailed if the environment failed or a deadline passed, if several agents ran, or
    if the server ran the episode again, and none of this counts as the policy's failure. Raises
    RewardProblem if a score or a weight is not a number, and ValueError if the records are of
    another version.
    """
    *news, end = answers
    if end.head is None:
        raise EpisodeFailed("environment", f"the server refused the episode: {end.error}")
    record: JsonObject = {}
    errors = []
    for answer in news:
        record |= answer.open | answer.set
        errors += answer.errors
    if not end.head.ok:
        errors += end.head.errors
        texts = [f"{error.type}: {error.message}" for error in errors]
        raise EpisodeFailed("environment", "; ".join(texts))
    names = {answer.trace for answer in news}
    if len(names) != 1:
        raise EpisodeFailed(
            "environment",
            f"{len(names)} agents ran, but the calls of one can be trained: serve an environment "
            "with one agent and without retries, of which agent.num_attempts says how many",
        )
    version = record.get("version")
    if version != RECORD_VERSION:
        raise ValueError(f"the server's records have version {version}: {_FIX}")
    try:
        trace = _Record.model_validate(record)
    except ValidationError as error:
        raise RewardProblem(f"the record has something that is no reward: {error}") from None
    if trace.is_timeout:
        raise EpisodeFailed("deadline", "a deadline of the environment passed")
    rewards = [reward for reward in trace.rewards.values() if reward]
    if not rewards:
        return None
    return sum(reward.score * reward.weight for reward in rewards)


def describe_verifiers(address: str) -> Description:
    """Checks that a server answers. It calls tools itself, and its episodes have rewards. Raises
    ValueError if none answers, or if its wire is another one."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{address}")
        asking.send_multipart([b"0", b"health", msgpack.packb({})])
        if not asking.poll(_CHECK_MS):
            raise ValueError(f"no server answers at agent.server=verifiers://{address}: {_FIX}")
        opened(asking.recv_multipart()[1:])
    return Description(tools=[], has_reward=True)
