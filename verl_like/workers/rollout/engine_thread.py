"""A rollout engine on a thread of its own, which takes requests and weights between two steps."""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from verl_like.workers.rollout.base import RolloutEngine
from verl_like.workers.rollout.request import (
    Completion,
    FinishedRequest,
    GenerationRequest,
    NamedCompletion,
)
from verl_like.workers.weights.exports import WeightExport

T = TypeVar("T")

_IDLE_S = 2.0
"""How long an idle thread waits for a command before it checks that its EngineThread still exists.
The other ranks of a replica wait for its first rank in the meantime, half an hour at most."""
_CLOSING_S = 5.0
"""How long `close` waits for the thread to end."""
_LONGEST_WAIT_S = 1.0
"""How long `stream` waits for responses before it asks again."""
_COMMAND_S = 1800.0
"""How long a rank waits for a command that the first rank of its replica has taken already."""
GATHER_S = 0.05
"""How long responses that have ended wait for others, so that they are collected together."""


@dataclass(frozen=True)
class _Command:
    """A call that another thread makes of the engine."""

    run: Callable[[], Any]
    answer: Future
    """The result of `run`, or the error that it raised."""
    drains: bool
    """If True, it runs when no response is unfinished, and later commands wait for it."""


class EngineThread:
    """Makes an engine on a thread of its own and steps it there.

    Any other thread may call its methods. A call becomes a command, and commands run between two
    steps of the engine, in the order of the calls. On each rank of a replica one thread makes the
    same calls in the same order. All ranks run a command between the same two steps, because the
    first rank says how many commands run before the next step.

    If a step raises, all waiting calls and all later ones raise the same error. No step is computed
    while the engine has no verified weights. `close` ends the thread; without `close` it ends when
    its EngineThread is garbage.
    """

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        """Returns when the engine is made. Raises what `make` raises, and the thread ends then."""
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._ages: dict[str, int] = {}
        """The steps of the engine since each unfinished request was submitted, by its name."""
        self._ended: dict[str, Completion] = {}
        """The responses that have ended and were not collected, by the names of their requests."""
        self._failure: Exception | None = None
        self._has_ended = threading.Event()
        self.engine: RolloutEngine
        """The engine. Other threads may read only those attributes of it that do not change."""
        made: Future[None] = Future()
        num_threads = torch.get_num_threads()
        makers = [make]  # a list, which `_run` empties
        owner = weakref.ref(self)
        arguments = (owner, makers, made, self._has_ended, num_threads)
        thread = threading.Thread(target=_run, args=arguments, name="rollout engine", daemon=True)
        thread.start()
        made.result()  # `_run` has set `engine`
        # A process that ends while a thread runs torch's code would abort.
        atexit.register(_close, owner)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submits requests to the engine; raises what `RolloutEngine.submit` raises."""

        def submit() -> None:
            self.engine.submit(requests)
            with self._changed:
                for request in requests:
                    self._ages[request.name] = 0

        self._ask(submit)

    def collect(self, wait_s: float, names: Collection[str] | None = None) -> dict[str, Completion]:
        """Collects the responses that have ended, by the names of their requests.

        Each response is returned once. This waits until at least one has ended, and then for others
        until GATHER_S have passed since the call, but never longer than `wait_s`. It ends at once
        if no request is unfinished. With `names` it considers these requests alone.
        """
        gathers_until = time.monotonic() + min(GATHER_S, wait_s)

        def considered(all_names: Collection[str]) -> list[str]:
            if names is None:
                return list(all_names)
            return [name for name in names if name in all_names]

        def is_over() -> bool:
            return self._failure is not None or not considered(self._ages)

        with self._changed:
            self._changed.wait_for(lambda: considered(self._ended) or is_over(), timeout=wait_s)
            left_s = max(0.0, gathers_until - time.monotonic())
            self._changed.wait_for(is_over, timeout=left_s)
            if self._failure:
                raise self._failure
            return {name: self._ended.pop(name) for name in considered(self._ended)}

    def stream(
        self, requests: Sequence[GenerationRequest]
    ) -> Generator[list[FinishedRequest], None, None]:
        """Submits requests, and yields lists of those that have ended, each request once."""
        self.submit(requests)
        waiting = {request.name: request for request in requests}
        try:
            while waiting:
                finished = []
                collected = self.collect(_LONGEST_WAIT_S, waiting)
                for name, completion in collected.items():
                    request = waiting.pop(name)
                    finished.append((request, completion))
                if finished:
                    yield finished
        finally:
            # A generator that fails or is closed early leaves no request behind.
            if waiting and not self._failure:
                self.abort(waiting)

    def abort(self, names: Collection[str]) -> None:
        """Drops requests, also those that have ended and were not collected."""
        names = list(names)

        def abort() -> None:
            self.engine.abort(names)
            with self._changed:
                for name in names:
                    self._ages.pop(name, None)
                    self._ended.pop(name, None)

        self._ask(abort)

    def ages(self) -> dict[str, int]:
        """Returns the engine's steps since each unfinished request was submitted, by its name."""
        with self._changed:
            if self._failure:
                raise self._failure
            return dict(self._ages)

    def num_left(self) -> int:
        """Returns the number of requests that are unfinished or that nobody has collected."""
        with self._changed:
            return len(self._ages) + len(self._ended)

    def load_weights(
        self,
        exports: Sequence[WeightExport],
        version: int,
        *,
        checks_first: bool = True,
        drain: bool = True,
    ) -> str:
        """Calls `RolloutEngine.load_weights`.

        With `drain` it does so after the last unfinished response has ended, and otherwise between
        two tokens of the unfinished responses.
        """

        def load() -> str:
            return self.engine.load_weights(exports, version, checks_first=checks_first)

        return self._ask(load, drains=drain)

    def sleep(self) -> None:
        """Calls `RolloutEngine.sleep`."""
        self._ask(self.engine.sleep)

    def wake(self) -> None:
        """Calls `RolloutEngine.wake`."""
        self._ask(self.engine.wake)

    def forget_prompts(self) -> None:
        """Calls `RolloutEngine.forget_prompts`."""
        self._ask(self.engine.forget_prompts)

    def _ask(self, run: Callable[[], T], drains: bool = False) -> T:
        """Has a command run on the engine's thread, waits for it, and returns its result."""
        command = _Command(run, Future(), drains)
        with self._changed:
            if self._failure:
                raise self._failure
            self._commands.append(command)
            self._changed.notify_all()
        return command.answer.result()

    def close(self) -> None:
        """Ends the thread after its present step. Calls that wait for the engine raise."""
        self._fail(RuntimeError("The rollout engine was closed."))
        self._has_ended.wait(timeout=_CLOSING_S)

    def _serve(self) -> None:
        """Runs the commands that are due, then one step of the engine if requests are unfinished.

        If there is nothing to do, the first rank of the replica waits a while for a command.
        """
        engine = self.engine
        number = self._num_ready(engine) if engine.is_collect else 0
        number = engine.agreed(number)
        for command in self._take(number):
            try:
                result = command.run()
                command.answer.set_result(result)
            except BaseException as error:  # also SystemExit, or the caller would wait forever
                command.answer.set_exception(_as_exception(error))
        if engine.is_busy:
            self._keep(engine.step())

    def _num_ready(self, engine: RolloutEngine) -> int:
        """Returns how many commands to run before the next step, on the replica's first rank.

        It waits for a command while the engine has nothing to compute. A command that drains, and
        those after it, are due only when the engine has nothing to compute.
        """

        def has_work() -> bool:
            return bool(self._commands) or self._failure is not None

        with self._changed:
            if not engine.is_busy:
                self._changed.wait_for(has_work, timeout=_IDLE_S)
                if self._commands and self._commands[0].drains:
                    return 1
            for number, command in enumerate(self._commands):
                if command.drains:
                    return number
            return len(self._commands)

    def _take(self, number: int) -> list[_Command]:
        """Takes the next commands off the queue, as many as the replica's first rank has said.

        This rank may have to wait for them. Raises TimeoutError if they do not come.
        """

        def are_there() -> bool:
            return len(self._commands) >= number or self._failure is not None

        with self._changed:
            self._changed.wait_for(are_there, timeout=_COMMAND_S)
            if self._failure:
                raise self._failure
            if len(self._commands) < number:
                raise TimeoutError(
                    f"The first rank of this replica was asked for something {_COMMAND_S:g} s ago "
                    "that this rank was not asked for; the ranks of a replica need the same calls "
                    "in the same order."
                )
            return [self._commands.popleft() for _ in range(number)]

    def _keep(self, ended: Sequence[NamedCompletion]) -> None:
        """Keeps the responses that a step has ended, and counts the step for the others."""
        with self._changed:
            for name, completion in ended:
                self._ended[name] = completion
                del self._ages[name]
            for name in self._ages:
                self._ages[name] += 1
            if ended:
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Makes all waiting calls and all later ones raise an error. The first error stays."""
        with self._changed:
            self._failure = self._failure or error
            for command in self._commands:
                command.answer.set_exception(error)
            self._commands.clear()
            self._changed.notify_all()


def _run(
    owner: "weakref.ref[EngineThread]",
    makers: list[Callable[[], RolloutEngine]],
    made: Future,
    has_ended: threading.Event,
    num_threads: int,
) -> None:
    """Makes the engine and serves it until its EngineThread fails, is closed or is garbage.

    Only a weak reference to the EngineThread remains between two rounds, so that it can become
    garbage. `makers` has one element, which is removed, so that what it refers to is freed too.
    """
    # A new thread inherits neither the limit of CPU threads nor no_grad.
    torch.set_num_threads(num_threads)
    with torch.no_grad():
        try:
            thread = owner()
            assert thread is not None
            make = makers.pop()
            thread.engine = make()
            del make
            made.set_result(None)
        except BaseException as error:  # also SystemExit, or the caller would wait forever
            made.set_exception(_as_exception(error))
            return
        while thread is not None and thread._failure is None:
            try:
                thread._serve()
            except BaseException as error:
                thread._fail(_as_exception(error))
            del thread
            thread = owner()
        has_ended.set()


def _as_exception(error: BaseException) -> Exception:
    """Returns the error itself, or a RuntimeError for one that would end a process, such as
    SystemExit."""
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"The rollout engine raised {error!r}.")
    ended.__cause__ = error
    return ended


def _close(owner: "weakref.ref[EngineThread]") -> None:
    thread = owner()
    if thread is not None:
        thread.close()
