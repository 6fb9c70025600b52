"""Runs one reward process. It has its own socket to the driver, so that its failure affects no
other process."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Strict, ValidationError

from verl_like.rewards.loader import RewardFunctionSpec
from verl_like.rewards.sample import RewardSample
from verl_like.rewards.scoring_server import MAX_ANSWER_BYTES
from verl_like.rewards.supervisor import MEMORY_EXIT_CODE, descendants, kill_all

START_S = 60.0
"""A process has so many seconds to start and import the user's module."""
_TRANSFER_S = 60
"""A message may stand still for so many seconds while it is read or written."""
EXIT_S = 10.0
"""An ended process has so many seconds to be gone."""
GIGABYTE = 10**9


class ProcessDied(RuntimeError):
    """A reward process ended unexpectedly, or was ended because it sent something that is no
    answer."""


class Message(BaseModel):
    """What another process says, which has to have these fields and types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Answer(Message):
    """The result for a sample: its score, or None as the score to leave the sample out, or an
    error.

    A reward process sends it as JSON text. If a process ends without an answer, the driver makes
    one.
    """

    score: float | None = None
    extra: dict[str, Any] = {}
    error: str = ""
    timed_out: bool = False
    # A list is accepted too, because JSON has no tuples.
    ran: Annotated[tuple[int, float, float], Strict(False)] | None = None
    """(process id, start, end) by time.time(). None if the process gave no answer."""


def start_server(
    module: str, socket_fd: int, max_memory_gb: float, *further_folders: str
) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs `serve` of a module with this end of a socket. It finds
    modules where this process does, and in further folders. Raises OSError if it cannot be
    started."""
    folders = [*map(str, sys.path), *further_folders]
    max_memory_bytes = int(max_memory_gb * GIGABYTE)
    program = (
        f"import sys; sys.path[:] = {folders!r}\n"
        f"from {module} import serve\n"
        f"serve({socket_fd}, {os.getpid()}, {max_memory_bytes})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        pass_fds=[socket_fd],
        process_group=0,  # it does not get the terminal's signals to the driver
    )


def end_supervisor(popen: subprocess.Popen[bytes]) -> int:
    """Ends a supervisor with all programs below it, if it runs. Returns its exit code."""
    # The supervisor gets the signal and ends all programs below it.
    popen.send_signal(signal.SIGTERM)
    try:
        return popen.wait(timeout=EXIT_S)
    except subprocess.TimeoutExpired:  # the supervisor is stopped
        kill_all([*descendants(popen.pid), popen.pid])
        return popen.wait(timeout=EXIT_S)


class RewardProcess:
    """A reward process. After it has ended, this object stands for the process that replaces it.

    The process is a new interpreter that imports none of the driver's modules, not even `__main__`.
    Only one thread at a time may use this object, but any thread may call `kill`.
    """

    def __init__(
        self, reward_fn: RewardFunctionSpec, timeout_s: float, max_memory_gb: float
    ) -> None:
        self.reward_fn = reward_fn
        self.timeout_s = timeout_s
        self.max_memory_gb = max_memory_gb
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_killed = False

    def start(self) -> None:
        """Starts the process, unless it runs, and waits until it has loaded the reward function.

        Raises ProcessDied if the process ends or takes too long, and ValueError if the function
        cannot be loaded.
        """
        if self._popen is not None:
            return
        self._spawn()
        self._send((self.reward_fn, self.timeout_s))
        try:
            loaded = self._receive(START_S)
        except TimeoutError:
            raise ProcessDied(
                f"it did not load the reward function within {START_S:.0f} s"
            ) from None
        problem = loaded.get("load_error")
        if loaded.keys() != {"load_error"} or not isinstance(problem, str | None):
            raise self._no_answer(loaded)
        if problem is not None:
            self.stop()
            raise ValueError(problem)

    def begin(self, sample: RewardSample) -> None:
        """Starts the process if needed, sends it a sample, and waits until it begins to score it.

        Raises the errors of `start`. If this raises ProcessDied, the sample was not begun, so it is
        not the cause.
        """
        self.start()
        self._send(sample)
        try:
            begun = self._receive(START_S)
        except TimeoutError:
            raise ProcessDied(f"it began no sample for {START_S:.0f} s") from None
        if begun != {"begun": True}:
            raise self._no_answer(begun)

    def answer(self) -> Answer:
        """Waits for the answer to the sample that was begun. Raises ProcessDied if the process
        ends, or sends something that is no answer. If it takes longer than `timeout_s`, the process
        is stopped and TimeoutError is raised."""
        message = self._receive(self.timeout_s)
        try:
            answer = Answer.model_validate(message)
        except ValidationError as error:
            raise self._no_answer(message) from error
        if answer.ran is None:
            raise self._no_answer(message)
        return answer

    def kill(self) -> None:
        """Ends the process for good, even while a thread waits for it. When no thread waits any
        more, `stop` has to be called."""
        with self._lock:
            self._is_killed = True
            if self._popen is not None:
                self._popen.send_signal(signal.SIGTERM)
                # Programs that the function has started may keep the other end open.
                self._socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> int:
        """Ends the process if it runs. Returns its exit code, or 0 if it did not run."""
        with self._lock:
            if self._popen is None:
                return 0
            exit_code = end_supervisor(self._popen)
            self._connection.close()
            self._socket.close()
            self._popen = None
            return exit_code

    def _spawn(self) -> None:
        """Starts an interpreter that runs `serve` with one end of a new socket. Raises ProcessDied
        if it cannot be started, or if `kill` was called."""
        ours, theirs = socket.socketpair()
        limit = struct.pack("@ll", _TRANSFER_S, 0)  # a timeval: seconds, microseconds
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        with self._lock, theirs:
            if self._is_killed:
                ours.close()
                raise ProcessDied("it was stopped")
            try:
                self._popen = start_server(
                    "verl_like.rewards.scoring_server", theirs.fileno(), self.max_memory_gb
                )
            except OSError as error:
                ours.close()
                raise ProcessDied(f"it could not be started: {error}") from error
            self._socket = ours  # for shutdown, which a Connection lacks
            self._connection = Connection(os.dup(ours.fileno()))

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self, limit_s: float) -> dict[str, Any]:
        """Waits for the next message. If none comes within `limit_s`, the process is stopped and
        TimeoutError is raised."""
        if not self._connection.poll(limit_s):
            self.stop()
            raise TimeoutError
        try:
            content = self._connection.recv_bytes(MAX_ANSWER_BYTES)
        except (OSError, EOFError) as error:
            raise self._died() from error
        try:
            message = json.loads(content)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise self._no_answer(content)
        return message

    def _no_answer(self, message: object) -> ProcessDied:
        """Stops a process that has sent something else than an answer, and returns the error. Its
        next message could be taken for the answer to another sample."""
        self.stop()
        return ProcessDied(
            f"it sent what is no answer, {repr(message)[:100]}, and was stopped: its code writes "
            "there"
        )

    def _died(self) -> ProcessDied:
        """Stops a process that has ended, or whose message cannot be read, and makes the error for
        it. The error has its exit code, or the limit of memory if the process was over that."""
        assert self._popen is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=EXIT_S)  # otherwise `stop` would change its exit code
        exit_code = self.stop()
        if exit_code == MEMORY_EXIT_CODE:
            limit = f"reward.max_memory_gb={self.max_memory_gb:g}"
            return ProcessDied(
                f"it used more memory than {limit} and was ended; use less, or raise that"
            )
        return ProcessDied(f"it died with exit code {exit_code}")
