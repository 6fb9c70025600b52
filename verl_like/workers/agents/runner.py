"""Runs the episodes of a rank: their attempts, their deadlines, and their calls of the model."""

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_like.workers.agents.episode import (
    Episode,
    EpisodeFailed,
    EpisodeSpec,
    FailureKind,
    Restarted,
    Reward,
    RewardProblem,
)
from verl_like.workers.agents.session import Limits, Session
from verl_like.workers.config.agent import AgentConfig
from verl_like.workers.rollout.request import Completion, GenerationRequest

Answers = Mapping[str, Completion]
"""Completions, by the names of their requests."""
GATHER_S = 0.005
"""How long requests wait for others, so that they travel together."""
START_S = 120.0
"""How long environments, harnesses and the endpoint may take to start."""
_CLOSING_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """How an episode ended."""

    reward: Reward
    ended: str = "done"
    """"done", "turns" or "room" if the policy has used them up, or "failed"."""
    is_scored: bool = True
    """False if others compute the reward."""


class Way(Protocol):
    """What acts in episodes: an environment class, a harness, or a server. It is used on one event
    loop."""

    async def start(self) -> None:
        """Begins before the first episode."""
        return  # some have nothing to do

    async def run(self, session: Session) -> Outcome:
        """Runs an episode. Raises EpisodeFailed, Restarted, or RewardProblem."""

    async def close(self) -> None:
        """Ends after the last episode."""
        return


@dataclass
class Exchange:
    """What a rank tells the driver."""

    requests: list[GenerationRequest] = field(default_factory=list)
    """New requests to the model."""
    aborted: list[str] = field(default_factory=list)
    """The names of requests whose answers nobody waits for any more."""
    episodes: list[Episode] = field(default_factory=list)
    """Episodes that have ended."""


class EpisodeRunner:
    """Runs episodes on an event loop in a thread of its own.

    The other methods may be called from any other thread. If something else than an episode fails,
    they raise that error.
    """

    def __init__(self, way: Way, limits: Limits, config: AgentConfig) -> None:
        """Starts what acts in episodes. Raises the error of `way.start`."""
        self.way = way
        self.limits = limits
        self.config = config
        self._places = asyncio.Semaphore(config.max_episodes)
        self._changed = threading.Condition()
        self._exchange = Exchange()
        """What the driver was not told yet."""
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        """The answers that calls wait for, by the names of their requests."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The episodes that run, by their names."""
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self._on_loop(way.start(), START_S)

    def begin(self, specs: Sequence[EpisodeSpec]) -> None:
        """Begins episodes, and returns at once."""
        self._loop.call_soon_threadsafe(self._begin, specs)

    def exchange(self, answers: Answers, wait_s: float) -> Exchange:
        """Gives calls their answers, by the names of their requests, and returns what is new. It
        waits for something new, at most `wait_s`."""
        self._loop.call_soon_threadsafe(self._answer, answers)
        with self._changed:
            is_there_news = self._changed.wait_for(self._has_news, timeout=wait_s)
        if is_there_news:
            time.sleep(GATHER_S)  # without the lock, so that nothing wakes this thread
        with self._changed:
            if self._failure is not None:
                raise self._failure
            told = self._exchange
            self._exchange = Exchange()
            return told

    def close(self) -> None:
        """Ends all episodes, and when they have let go of it, what acts in them."""

        async def end() -> None:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.way.close()

        self._on_loop(end(), _CLOSING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_S)

    def _on_loop(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Runs a coroutine on the event loop, and waits for its end, at most `limit_s`."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        running.result(limit_s)

    def _has_news(self) -> bool:
        return self._failure is not None or self._exchange != Exchange()

    def _begin(self, specs: Sequence[EpisodeSpec]) -> None:
        for spec in specs:
            episode = self._run(spec)
            task = self._loop.create_task(episode)
            self._tasks[spec.request.name] = task

    def _answer(self, answers: Answers) -> None:
        for name, completion in answers.items():
            answer = self._answers.get(name)
            if answer and not answer.done():
                answer.set_result(completion)

    async def complete(self, request: GenerationRequest) -> Completion:
        """Sends a request to the driver, and waits for its answer. If the caller is cancelled, the
        driver is told that nobody waits for it."""
        answer: asyncio.Future[Completion] = self._loop.create_future()
        self._answers[request.name] = answer
        with self._changed:
            self._exchange.requests.append(request)
            self._changed.notify_all()
        try:
            return await answer
        except asyncio.CancelledError:
            with self._changed:
                self._exchange.aborted.append(request.name)
            raise
        finally:
            del self._answers[request.name]

    async def _run(self, spec: EpisodeSpec) -> None:
        """Runs an episode to its end, and tells the driver how it ended."""
        name = spec.request.name
        try:
            async with self._places:
                episode = await self._attempts(spec)
        except Exception as error:  # of this library: the run has to end
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return
        finally:
            del self._tasks[name]
        with self._changed:
            self._exchange.episodes.append(episode)
            self._changed.notify_all()

    async def _attempts(self, spec: EpisodeSpec) -> Episode:
        """Tries an episode until it ends or the attempts are used up."""
        failures: list[tuple[FailureKind, str]] = []
        for number in itertools.count():
            name = f"{spec.request.name}, attempt {number}"
            session = Session(spec, self, self.limits, name=name)
            started = time.time()
            try:
                outcome = await self._attempt(session)
                return _ended(session, outcome, failures, started)
            except Restarted:
                continue
            except RewardProblem as problem:
                return _ended(session, Outcome(None), failures, started, str(problem))
            except EpisodeFailed as failure:
                failures.append((failure.kind, str(failure)))
            if len(failures) == self.config.num_attempts:
                # Nothing of what it has drawn is kept.
                session = Session(spec, self, self.limits, name=name)
                return _ended(session, Outcome(None, "failed"), failures, started)
        raise AssertionError("the attempts have no end of their own")

    async def _attempt(self, session: Session) -> Outcome:
        limit_s = self.config.episode_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self.way.run(session)
        except TimeoutError:
            text = f"the episode took over agent.episode_timeout_s={limit_s:g} s"
            raise EpisodeFailed("deadline", text) from None


def _ended(
    session: Session,
    outcome: Outcome,
    failures: Sequence[tuple[FailureKind, str]],
    started: float,
    reward_problem: str = "",
) -> Episode:
    """Makes the record of an episode that has ended. Raises RewardProblem if its reward is none."""
    reward = outcome.reward
    has_reward = True
    if reward is None:
        reward = 0.0
        has_reward = not outcome.is_scored
    return Episode(
        name=session.spec.request.name,
        rows=session.finish(reward),
        has_reward=has_reward,
        ended=outcome.ended,
        failures=tuple(failures),
        reward_problem=reward_problem,
        counts=session.counts,
        turns=tuple(session.turns.values()),
        started=started,
        seconds=time.time() - started,
    )
