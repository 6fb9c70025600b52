"""The program of a host process. It runs the code of a user for many episodes at once.

The code is an environment class or a harness function. Each call comes as a JSON line and is
answered with one. Synchronous methods run in threads, so that many episodes wait at once.
Coroutines run on an event loop in the main thread.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import socket
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_like.rewards.supervisor import supervise
from verl_like.workers.agents.reward_key import set_reward_key

JsonObject = dict[str, Any]
MAX_LINE_BYTES = 1 << 20
"""The agent reads no longer lines of a host process. This module never sends one."""
MAX_ERROR_CHARS = 4_000
NO_TOOLS = ("reset", "get_reward")
"""The public methods of an environment class that the model cannot call."""
_MAX_THREADS = 1 << 14
"""So many synchronous methods run at once. A thread is started only when all others are busy."""


class Unavailable(RuntimeError):
    """An environment raises this if it cannot go on for no fault of the policy. The attempt then
    counts as a failure of the environment, and the model does not see the text."""


def serve(socket_fd: int, parent_pid: int, max_memory_bytes: int) -> None:
    """Runs a host process, until the agent closes its end of the socket.

    Its parent process, the supervisor, ends this process and the programs that it has started, at
    the latest when the agent ends.
    """
    supervise(parent_pid, max_memory_bytes)
    os.set_inheritable(socket_fd, False)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    connection = socket.socket(fileno=socket_fd)
    host = _Host(connection, loop)
    host.load()
    reader = threading.Thread(target=host.read, daemon=True)
    reader.start()
    loop.run_forever()


def load(kind: str, path: str) -> Any:
    """Imports the class or the function that `agent.environment` or `agent.harness` names, as
    `kind` says. `path` is "module:name". Raises ValueError if it cannot be imported."""
    module, _colon, name = path.partition(":")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, name)
    except BaseException as error:  # custom code: a script may end itself
        raise ValueError(
            f"agent.{kind}={path} cannot be imported ({type(error).__name__}: {error}): give "
            "module:name, with the module in the current folder or on PYTHONPATH"
        ) from error


def to_line(message: JsonObject) -> bytes:
    """The message as a line. Raises TypeError or ValueError if it is no JSON."""
    text = _JSON.encode(message)
    return text.encode(errors="replace") + b"\n"


def _plain(value: Any) -> Any:
    """Turns a scalar of NumPy or torch into a Python number. Raises TypeError for all else."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)


class _Host:
    """The state of a host process: the loaded code, its instances and the calls that run."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._loop = loop
        self._file = ""
        self._threads = ThreadPoolExecutor(_MAX_THREADS)
        self._writing = threading.Lock()
        self._tasks: dict[int, asyncio.Task[None] | None] = {}
        """The coroutines that run, by the ids of their calls."""
        self._instances: dict[int, Any] = {}
        """The instance of each episode, by the episode's seat."""
        self._free: list[Any] = []
        """Instances of episodes that have ended well. They are used again."""

    def load(self) -> None:
        """Answers the first call, which says what to load."""
        call = json.loads(self._lines.readline())
        number = call["id"]
        arguments = call["arguments"]
        set_reward_key(arguments.pop("reward_key"))
        try:
            self._code = load(**arguments)
            self._file = inspect.getfile(self._code)
            self._send({"id": number})
        except ValueError as error:
            self._answer_error(number, error)

    def read(self) -> None:
        """Does what each further line says. When the agent is gone, it ends this process.

        A call may take long. So another thread reads on while this one makes it.
        """
        for line in self._lines:
            message = json.loads(line)
            if "method" in message:
                self._threads.submit(self.read)
                self._call(**message)
                return
            if "cancel" in message:
                cancelling = self._cancel(message["cancel"])
                self._start(cancelling)
            else:
                self._leave(**message)
        os._exit(0)

    def _call(self, id: int, seat: int, method: str, arguments: JsonObject) -> None:
        """Calls the code in a thread. A coroutine goes on in the event loop."""
        try:
            function = self._function(seat, method)
            result = function(**arguments)
            if inspect.iscoroutine(result):
                finishing = self._finish(id, method, result)
                self._start(finishing)
            else:
                self._answer(id, method, result)
        except BaseException as error:  # custom code: even SystemExit is an error of this call
            self._answer_error(id, error)

    def _function(self, seat: int, method: str) -> Any:
        """The harness function, or the method of the episode's instance. An episode gets its
        instance at its first call."""
        if not inspect.isclass(self._code):
            return self._code
        if seat not in self._instances:
            taken = []
            # Calls of several episodes begin at the same time, and each takes its own.
            with contextlib.suppress(IndexError):
                taken.append(self._free.pop())
            self._instances[seat] = taken[0] if taken else self._code()
        return getattr(self._instances[seat], method)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine of this class. They begin in the order of these calls."""
        self._loop.call_soon_threadsafe(self._loop.create_task, coroutine)

    async def _finish(self, id: int, method: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._tasks[id] = asyncio.current_task()
        try:
            result = await coroutine
            self._answer(id, method, result)
        except BaseException as error:  # a cancelled one is answered too
            self._answer_error(id, error)
        del self._tasks[id]

    async def _cancel(self, id: int) -> None:
        """Cancels a coroutine, and says that this process lives. A method in a thread goes on."""
        task = self._tasks.get(id)
        if task:
            task.cancel()
        self._send({"id": id, "is_heard": True})

    def _leave(self, leave: int, failed: bool) -> None:
        """Takes back the instance of an episode that has ended. That of a failed one is dropped."""
        instance = self._instances.pop(leave, None)
        if instance is not None and not failed:
            self._free.append(instance)

    def _answer(self, id: int, method: str, result: Any) -> None:
        """Answers with the result. That of a tool is text, as in TRL."""
        is_tool = inspect.isclass(self._code) and method not in NO_TOOLS
        if is_tool:
            result = str(result)
        self._send({"id": id, "value": result})

    def _answer_error(self, id: int, error: BaseException) -> None:
        """Answers with an error, and with the last line of the code's own file that it passed."""
        kind = type(error).__name__
        text = f"{kind}: {error}"
        place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if code.co_filename == self._file:
                place = f"{self._file}:{line} in {code.co_name}"
        answer = {
            "id": id,
            "error": text[:MAX_ERROR_CHARS],
            "place": place,
            "is_unavailable": isinstance(error, Unavailable),
        }
        self._send(answer)

    def _send(self, message: JsonObject) -> None:
        """Sends a message. Raises TypeError or ValueError if it is no JSON, or too long."""
        line = to_line(message)
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"the result has more than {MAX_LINE_BYTES} bytes in JSON")
        with self._writing:
            self._connection.sendall(line)
