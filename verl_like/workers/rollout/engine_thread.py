"""A rollout engine on a thread of its own: it takes requests and weights between two steps and
computes meanwhile."""

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
from verl_like.workers.rollout.request import Completion, FinishedRequest, GenerationRequest
from verl_like.workers.weights.exports import WeightExport

T = TypeVar("T")

_IDLE_S = 2.0
"""How long the thread waits for something to do, before it looks whether anybody can still ask. The
other ranks of a replica wait for the first one, half an hour at most."""
_CLOSING_S = 5.0
_LONGEST_WAIT_S = 1.0
"""After which `stream` asks again for what has ended."""
_COMMAND_S = 1800.0
"""How long a rank waits for a command that the first rank of its replica has taken already."""
GATHER_S = 0.05
"""How long responses that have ended wait for others, so that they are told together."""


@dataclass(frozen=True)
class _Command:
    """What another thread asks of the engine."""

    run: Callable[[], Any]
    answer: Future
    drains: bool
    """It runs when no response is unfinished, and what is asked after it runs later."""


class EngineThread:
    """Makes an engine on a thread of its own and steps it there; every method may be called on any
    other thread.

    What is asked of the engine is done between two steps, in the order in which it was asked. The
    ranks of a replica are asked the same in the same order, each by one thread, and do it between
    the same two steps: the first one says how much of it comes before the next step.

    If a step raises, so does whatever waits for the engine, and every later call. While the last
    weights did not arrive no step is computed. `close` ends the thread; one whose EngineThread is
    not used any more ends by itself.
    """

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._ages: dict[str, int] = {}
        """Steps of the engine since each unfinished request was submitted."""
        self._ended: dict[str, Completion] = {}
        """Responses that nobody has collected."""
        self._failure: Exception | None = None
        self._has_ended = threading.Event()
        self.engine: RolloutEngine
        """To be asked for what does not change."""
        made: Future[None] = Future()
        arguments = weakref.ref(self), [make], made, self._has_ended, torch.get_num_threads()
        threading.Thread(target=_run, args=arguments, name="rollout engine", daemon=True).start()
        made.result()
        # A thread in torch's code would abort the end of the process
        atexit.register(_close, weakref.ref(self))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes requests in; raises what `RolloutEngine.submit` raises."""

        def submit() -> None:
            self.engine.submit(requests)
            with self._changed:
                self._ages |= dict.fromkeys((request.name for request in requests), 0)

        self._ask(submit)

    def collect(self, wait_s: float, names: Collection[str] | None = None) -> dict[str, Completion]:
        """The responses that have ended since they were asked for last, by the names of their
        requests.

        Waits until one has ended, `wait_s` at most. While others are unfinished it waits for these
        too, until GATHER_S have passed since the call. `names` are the only requests that are asked
        for.
        """
        started = time.monotonic()

        def ended() -> list[str]:
            return (
                list(self._ended)
                if names is None
                else [name for name in names if name in self._ended]
            )

        def is_over() -> bool:
            unfinished = self._ages if names is None else self._ages.keys() & set(names)
            return self._failure is not None or not unfinished

        with self._changed:
            self._changed.wait_for(lambda: ended() or is_over(), timeout=wait_s)
            left_s = started + min(GATHER_S, wait_s) - time.monotonic()
            self._changed.wait_for(is_over, timeout=max(0.0, left_s))
            if self._failure:
                raise self._failure
            return {name: self._ended.pop(name) for name in ended()}

    def stream(
        self, requests: Sequence[GenerationRequest]
    ) -> Generator[list[FinishedRequest], None, None]:
        """Has requests drawn; gives lists of those that have ended, each once."""
        self.submit(requests)
        waiting = {request.name: request for request in requests}
        try:
            while waiting:
                ended = self.collect(_LONGEST_WAIT_S, waiting)
                if ended:
                    yield [(waiting.pop(name), completion) for name, completion in ended.items()]
        finally:  # a call that fails or is closed early leaves no request behind
            if waiting and not self._failure:
                self.abort(waiting)

    def abort(self, names: Collection[str]) -> None:
        """Forgets requests, also those that have ended and were not collected."""
        names = list(names)

        def abort() -> None:
            self.engine.abort(names)
            with self._changed:
                for name in names:
                    self._ages.pop(name, None)
                    self._ended.pop(name, None)

        self._ask(abort)

    def ages(self) -> dict[str, int]:
        """The steps of the engine since each unfinished request was submitted, by name."""
        with self._changed:
            if self._failure:
                raise self._failure
            return dict(self._ages)

    def num_left(self) -> int:
        """The requests that are unfinished, and those that have ended and were not collected."""
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
        """`RolloutEngine.load_weights`: with `drain` after the last unfinished response has ended,
        and without it between two of its tokens."""
        return self._ask(
            lambda: self.engine.load_weights(exports, version, checks_first=checks_first),
            drains=drain,
        )

    def sleep(self) -> None:
        """`RolloutEngine.sleep`."""
        self._ask(self.engine.sleep)

    def wake(self) -> None:
        """`RolloutEngine.wake`."""
        self._ask(self.engine.wake)

    def forget_prompts(self) -> None:
        """`RolloutEngine.forget_prompts`."""
        self._ask(self.engine.forget_prompts)

    def _ask(self, run: Callable[[], T], drains: bool = False) -> T:
        """The result of a command, after it has run on the engine's thread."""
        command = _Command(run, Future(), drains)
        with self._changed:
            if self._failure:
                raise self._failure
            self._commands.append(command)
            self._changed.notify_all()
        return command.answer.result()

    def close(self) -> None:
        """Ends the thread after the step that it computes, whatever is unfinished; what waits for
        the engine raises."""
        self._fail(RuntimeError("The rollout engine was closed."))
        self._has_ended.wait(timeout=_CLOSING_S)

    def _serve(self) -> None:
        """Does what was asked, and a step if requests are unfinished. Waits a while where there is
        neither."""
        engine = self.engine
        number = self._num_ready(engine) if engine.is_collect else 0
        for command in self._take(engine.agreed(number)):
            try:
                command.answer.set_result(command.run())
            except BaseException as error:  # a SystemExit would leave the one who asked waiting
                command.answer.set_exception(_as_exception(error))
        if engine.is_busy:
            self._keep(engine.step())

    def _num_ready(self, engine: RolloutEngine) -> int:
        """The commands to run before the next step. Waits for one where there is nothing to
        compute."""
        with self._changed:
            if not engine.is_busy:
                self._changed.wait_for(lambda: self._commands or self._failure, timeout=_IDLE_S)
                if self._commands and self._commands[0].drains:
                    return 1
            until_drained = [
                number for number, command in enumerate(self._commands) if command.drains
            ]
            return until_drained[0] if until_drained else len(self._commands)

    def _take(self, number: int) -> list[_Command]:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._commands) >= number or self._failure, timeout=_COMMAND_S
            )
            if self._failure:
                raise self._failure
            if len(self._commands) < number:
                raise TimeoutError(
                    f"The first rank of this replica was asked for something {_COMMAND_S:g} s ago "
                    "that this rank was not asked for; the ranks of a replica need the same calls "
                    "in the same order."
                )
            return [self._commands.popleft() for _ in range(number)]

    def _keep(self, ended: Sequence[tuple[str, Completion]]) -> None:
        with self._changed:
            for name, completion in ended:
                self._ended[name] = completion
                del self._ages[name]
            for name in self._ages:
                self._ages[name] += 1
            if ended:
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
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
    """The thread. It keeps the EngineThread alive only while it does something, and forgets what
    makes the engine.

    Neither the limit of CPU threads nor no_grad comes from the thread that started it.
    """
    torch.set_num_threads(num_threads)
    with torch.no_grad():
        try:
            thread = owner()
            assert thread is not None
            thread.engine = makers.pop()()
            made.set_result(None)
        except BaseException as error:  # a SystemExit would leave the one who waits waiting
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
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"The rollout engine raised {error!r}.")
    ended.__cause__ = error
    return ended


def _close(owner: "weakref.ref[EngineThread]") -> None:
    if (thread := owner()) is not None:
        thread.close()
