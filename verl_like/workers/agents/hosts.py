"""Host processes, seen from the agent. They run the code of a user, which is isolated from the
agent, for many episodes at once."""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, ValidationError

from verl_like.rewards.process import EXIT_S, START_S, Message, end_supervisor, start_server
from verl_like.rewards.supervisor import MEMORY_EXIT_CODE
from verl_like.workers.agents.episode import EpisodeFailed, FailureKind, Restarted
from verl_like.workers.agents.host_process import (
    MAX_ERROR_CHARS,
    MAX_LINE_BYTES,
    JsonObject,
    to_line,
)

_GRACE_S = 1.0
"""A call that is late or cancelled has so many seconds to end before its process is ended."""
_ATTEMPTS = 3
_LOADING = 0
"""The seat of the call that loads the code."""
_SERVER = "verl_like.workers.agents.host_process"
_DESCRIBE = "verl_like.workers.agents.description:describe"


class UserCodeError(RuntimeError):
    """The code of a user raised an error."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(f"{text}\n  at {place}" if place else text)
        self.text = text
        """The type and the message of the error."""

    def refusal(self) -> ValueError:
        """The ValueError that this is, where loading code was called."""
        return ValueError(self.text.removeprefix("ValueError: "))


@dataclass(frozen=True)
class HostedCode:
    """The code that host processes run."""

    kind: Literal["environment", "harness"]
    """A class whose methods are called, or a function."""
    path: str
    """ "module:name"."""
    reward_key: str = ""
    """What `reward_key()` returns in the processes."""


class Description(Message):
    """What an environment class offers."""

    tools: list[JsonObject]
    """The JSON schemas of its tools, as `transformers.utils.get_json_schema` makes them."""
    has_reward: bool
    """Whether it has a method `get_reward`."""


class _Answer(Message):
    """A line of a host process: what has become of a call."""

    id: int
    value: Any = None
    error: Annotated[str, StringConstraints(max_length=MAX_ERROR_CHARS)] | None = None
    place: str = ""
    is_unavailable: bool = False
    is_heard: bool = False
    """The call goes on, but the process has heard that it is late or cancelled."""


@dataclass(eq=False)
class _Call:
    """A call that has no answer yet."""

    seat: int
    what: str
    """Its method and its deadline, for messages."""
    future: asyncio.Future[Any]
    is_late: bool = False
    is_heard: bool = False

    def fail(self, error: Exception) -> None:
        """Lets the call raise an error, unless it was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


class Hosts:
    """Host processes that run the code of a user. They are used on one event loop.

    `max_memory_gb` (10^9 bytes) is the most that a process may use, counting the programs that it
    starts.
    """

    def __init__(self, code: HostedCode, num_processes: int, max_memory_gb: float) -> None:
        self._code = code
        self._num_processes = num_processes
        self._max_memory_gb = max_memory_gb
        self._processes: list[_Process] = []
        """With those that have ended, until all programs below them have ended too."""

    async def start(self) -> None:
        """Starts the processes. Raises ValueError if the code cannot be loaded. `close` ends them
        in any case."""
        try:
            starting = [process.ready() for process in self._running()]
            await asyncio.gather(*starting)
        except EpisodeFailed as error:
            raise ValueError(f"{error}: load the module with python to see why") from error

    async def seat(self) -> "Seat":
        """Returns a place for an episode, in the process that has the fewest. A process that has
        ended is replaced first. Raises ValueError if the code cannot be loaded any more."""
        causes = []
        for _ in range(_ATTEMPTS):
            process = min(self._running(), key=lambda each: each.num_episodes)
            seat = Seat(process)
            try:
                await process.ready()
                return seat
            except EpisodeFailed as error:
                causes.append(str(error))
            except asyncio.CancelledError:
                seat.leave()
                raise
        why = "; ".join(causes)
        raise ValueError(
            f"{_ATTEMPTS} host processes in a row ended before an episode began ({why}): the "
            "machine may be out of memory, or the module ends its process"
        )

    async def close(self) -> None:
        """Ends the processes and all programs that they have started."""
        closing = [process.close() for process in self._processes]
        await asyncio.gather(*closing)

    def _running(self) -> list["_Process"]:
        """The processes that run. As many are started as are missing."""
        self._processes = [each for each in self._processes if not each.has_left_nothing()]
        running = [each for each in self._processes if not each.ending]
        num_missing = self._num_processes - len(running)
        for _ in range(num_missing):
            new = _Process(self._code, self._max_memory_gb)
            running.append(new)
            self._processes.append(new)
        return running


class Seat:
    """A place for one episode in a host process. An environment class has an instance for it."""

    is_done = False
    """An environment class never ends an episode by itself."""

    def __init__(self, process: "_Process") -> None:
        process.num_episodes += 1
        self._process = process
        self._number = next(process.numbers)

    async def call(self, method: str, arguments: JsonObject, timeout_s: float) -> Any:
        """Calls a method of the instance, or the harness function, and returns a JSON value. The
        result of a tool is text. Calls of one instance at the same time run at the same time.

        Raises UserCodeError if the code raises an error. Raises EpisodeFailed if the call takes
        longer than `timeout_s` or the code says that it is unavailable, or if the process ends
        during the call and this call may be the cause. Raises Restarted if the process ended
        otherwise. A call that is cancelled is treated as a late one.
        """
        return await self._process.call(self._number, method, arguments, timeout_s)

    def leave(self, failed: bool = False) -> None:
        """Ends the use of this place. `failed` says that the instance is not used again, which has
        to be so after a call that was late or cancelled."""
        self._process.num_episodes -= 1
        self._process.send({"leave": self._number, "failed": failed})


class _Process(asyncio.Protocol):
    """A host process. It is started when it is made, and never again after it has ended."""

    def __init__(self, code: HostedCode, max_memory_gb: float) -> None:
        self.num_episodes = 0
        self.numbers = itertools.count(_LOADING + 1)
        """Of its seats and calls."""
        self.ending: asyncio.Task[Any] | None = None
        """Ends the process and all programs below it. None while it runs."""
        self._code = code
        self._max_memory_gb = max_memory_gb
        self._calls: dict[int, _Call] = {}
        self._rest = b""
        self._unsent: list[bytes] = []
        """Lines that travel together when the event loop comes to it."""
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = start_server(_SERVER, theirs.fileno(), max_memory_gb, os.getcwd())
        self._loading = self._loop.create_task(self._load(ours))

    async def ready(self) -> None:
        """Waits until the code is loaded. Raises EpisodeFailed if the process ends before that, and
        ValueError if the code cannot be loaded."""
        await asyncio.shield(self._loading)

    async def call(self, seat: int, method: str, arguments: JsonObject, limit_s: float) -> Any:
        """See `Seat.call`."""
        if self.ending:
            raise Restarted
        number = next(self.numbers)
        self.send({"id": number, "seat": seat, "method": method, "arguments": arguments})
        what = f"{method} within {limit_s:g} s"
        future = self._loop.create_future()
        call = _Call(seat, what, future)
        self._calls[number] = call
        timer = self._loop.call_later(limit_s, self._withdraw, number)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._withdraw(number)
            raise
        finally:
            timer.cancel()

    def send(self, message: JsonObject) -> None:
        """Sends a message, unless the process has ended."""
        if self.ending or self._transport is None:
            return
        line = to_line(message)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(line)

    def _flush(self) -> None:
        lines = b"".join(self._unsent)
        self._transport.write(lines)
        self._unsent = []

    def has_left_nothing(self) -> bool:
        """Returns whether it has ended with all programs below it."""
        return self.ending is not None and self.ending.done()

    async def close(self) -> None:
        """Ends the process and all programs below it."""
        self._loading.cancel()
        self._end(self._code.kind, "was stopped", _LOADING)
        assert self.ending is not None
        await self.ending

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._rest + data
        *lines, self._rest = received.split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
        for line in lines:
            if not self._take(line):
                cause = f"sent {line[:100]!r}, which is no answer, and was ended"
                self._end(self._code.kind, cause)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._code.kind)

    async def _load(self, ours: socket.socket) -> None:
        """Has the process load the code."""
        await self._loop.create_unix_connection(lambda: self, sock=ours)
        try:
            await self.call(_LOADING, "load", asdict(self._code), START_S)
        except UserCodeError as error:
            raise error.refusal() from error

    def _withdraw(self, number: int) -> None:
        """Has a call end that is late or cancelled. If it goes on, the process is ended."""
        call = self._calls.get(number)
        if call is None:
            return
        call.is_late = True
        self.send({"cancel": number})
        self._loop.call_later(_GRACE_S, self._end_overdue, number)

    def _end_overdue(self, number: int) -> None:
        """Ends the process if a call has not ended in time. If the process does not even say that
        it has heard of that, another call may hold it up, so each may be the cause."""
        call = self._calls.get(number)
        if call is None:
            return
        cause = f"did not end {call.what} and was ended"
        blamed = None
        if call.is_heard:
            blamed = call.seat
        self._end("deadline", cause, blamed)

    def _take(self, line: bytes) -> bool:
        """Gives an answer to its call. Returns False if the line is no answer."""
        try:
            answer = _Answer.model_validate_json(line)
        except ValidationError:
            return False
        call = self._calls.get(answer.id)
        if call is None:  # a call may have ended before it was heard that it is late
            return answer.is_heard
        if answer.is_heard:
            call.is_heard = True
            return True
        del self._calls[answer.id]
        if call.is_late:
            call.fail(self._failure("deadline", f"did not end {call.what}"))
        elif answer.is_unavailable:
            call.fail(self._failure(self._code.kind, f"said {answer.error}"))
        elif answer.error is not None:
            call.fail(UserCodeError(answer.error, answer.place))
        elif not call.future.done():
            call.future.set_result(answer.value)
        return True

    def _end(self, kind: FailureKind, cause: str = "", blamed: int | None = None) -> None:
        """Ends the process, unless it has ended. The episode at the seat `blamed` has failed, or
        with None each that has a call. Without a cause the process has ended by itself."""
        if self.ending:
            return
        burial = self._bury(kind, cause, blamed)
        self.ending = self._loop.create_task(burial)

    async def _bury(self, kind: FailureKind, cause: str, blamed: int | None) -> None:
        """Answers the calls and ends what is left of the process."""
        if not cause:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._popen.wait, EXIT_S)
            cause = f"died with exit code {self._popen.returncode}"
        if self._popen.returncode == MEMORY_EXIT_CODE:
            limit = f"agent.max_memory_gb={self._max_memory_gb:g}"
            cause = f"used more memory than {limit} and was ended; use less, or raise that"
        for call in self._calls.values():
            failure: Exception = self._failure(kind, cause)
            if blamed not in (None, call.seat):
                failure = Restarted(str(failure))
            call.fail(failure)
        self._calls.clear()
        if self._transport is not None:
            self._transport.abort()
        await asyncio.to_thread(end_supervisor, self._popen)

    def _failure(self, kind: FailureKind, cause: str) -> EpisodeFailed:
        key = f"agent.{self._code.kind}={self._code.path}"
        return EpisodeFailed(kind, f"{key}: its process {cause}")


def describe_environment(path: str, max_memory_gb: float) -> Description:
    """Loads an environment class in a process that ends at once, and says what it offers.

    Raises ValueError if `path`, which is "module:Class", is no class that can be an environment.
    """
    described = _describe("environment", path, max_memory_gb)
    return Description.model_validate(described)


def describe_harness(path: str, max_memory_gb: float) -> None:
    """Raises ValueError if `path`, which is "module:function", is no async function that can be
    called with a row, a base_url and an api_key."""
    _describe("harness", path, max_memory_gb)


def _describe(kind: str, path: str, max_memory_gb: float) -> Any:
    """Describes code in a process of its own. The event loop runs in a thread, because a notebook
    has one in the main thread already."""

    async def description() -> Any:
        hosts = Hosts(HostedCode("harness", _DESCRIBE), 1, max_memory_gb)
        try:
            seat = await hosts.seat()
            arguments = {"kind": kind, "path": path}
            return await seat.call("describe", arguments, START_S)
        finally:
            await hosts.close()

    with ThreadPoolExecutor(1) as thread:
        described = thread.submit(asyncio.run, description())
        try:
            return described.result(timeout=3 * START_S)
        except UserCodeError as error:
            raise error.refusal() from error
        except EpisodeFailed as error:
            raise ValueError(
                f"agent.{kind}={path} cannot be loaded ({error}): load it with python to see why"
            ) from error
