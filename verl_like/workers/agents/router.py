"""The driver's side of episodes: it gives them to the ranks of the agents, and the requests of
these ranks to the replicas of the rollout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_like.protocol import CallHeader, DataProto, DataProtoFuture
from verl_like.single_controller.dispatch import PerRank
from verl_like.single_controller.failure import CallTimeout
from verl_like.single_controller.worker_group import BoundMethod, WorkerGroup
from verl_like.workers.agents.batch import EpisodeRules, assemble_episodes, rows_of
from verl_like.workers.agents.episode import AgentsFailed, Episode, EpisodeSpec
from verl_like.workers.agents.runner import Exchange
from verl_like.workers.rollout.request import Completion, FinishedRequest, GenerationRequest
from verl_like.workers.rollout.router import RequestCall, RequestRouter, ResponsesFuture

EXCHANGE_S = 0.02
"""The longest time that a rank or a replica waits for something new while episodes run."""
METHOD = "run_episodes"
"""The method that a call stands for, as errors and the timeline name it."""

OnEpisodes = Callable[[DataProto, Sequence[Episode]], None]
"""Called with the prompts of a call, and with its episodes once all have ended."""


def ignore_episodes(prompts: DataProto, episodes: Sequence[Episode]) -> None:
    """Does nothing with the episodes of a call."""


def call_by_episodes(method: BoundMethod, prompts: DataProto) -> DataProtoFuture:
    """Calls `AgentWorker.run_episodes` by giving episodes to its ranks."""
    router = method.group.caller
    assert isinstance(router, EpisodeRouter), "connect_agents comes first"
    return router.run_episodes(prompts)


def connect_agents(agents: WorkerGroup, rollout: WorkerGroup, on_episodes: OnEpisodes) -> None:
    """Makes one router for both groups, whose models were loaded."""
    router = EpisodeRouter(rollout, agents, on_episodes)
    agents.caller = router
    rollout.caller = router


class EpisodeCall(RequestCall):
    """A call of `run_episodes`: prompts, and the episodes that have ended so far."""

    router: "EpisodeRouter"

    def __init__(
        self, router: "EpisodeRouter", prompts: DataProto, requests: Sequence[GenerationRequest]
    ) -> None:
        super().__init__(router, prompts, requests)
        self.episodes: dict[str, Episode] = {}

    def stream(self) -> Iterator[list[FinishedRequest]]:
        """Yields nothing: an episode is scored when all are there."""
        return iter(())

    def add_span(self, rank: int, started: float, ended: float) -> None:
        """Extends the time in which a rank ran episodes of this call, by `time.time()`."""
        first, last = self.spans.get(rank, (started, ended))
        self.spans[rank] = (min(first, started), max(last, ended))

    def done(self) -> bool:
        return self.error is not None or len(self.episodes) == len(self.requests)

    def assembled(self) -> DataProto:
        episodes = [self.episodes[name] for name in self.requests]
        self.router.on_episodes(self.prompts, episodes)
        self.router.require_success(episodes)
        return assemble_episodes(self.prompts, episodes, self.router.episode_rules)


@dataclass
class _Place:
    """Where an episode runs."""

    rank: int
    """Of the agents."""
    replica: int | None
    """Of the rollout, which takes all its requests, because it has their prompts in its cache."""


class EpisodeRouter(RequestRouter):
    """A router that runs episodes, too. They run on the ranks of the agents, and their requests go
    to the replicas beside those of other calls."""

    def __init__(self, rollout: WorkerGroup, agents: WorkerGroup, on_episodes: OnEpisodes) -> None:
        super().__init__(rollout)
        self.agents = agents
        self.on_episodes = on_episodes
        self.episode_rules: EpisodeRules = agents.episode_rules()[0]
        self.call_of_episode: dict[str, EpisodeCall] = {}
        """The call of each episode that has not ended, by the episode's name."""
        self.places: dict[str, _Place] = {}
        """The place of each such episode."""
        self.episode_of_request: dict[str, str] = {}
        """The name of the episode of each unfinished request that one has made."""
        self.to_begin = self._for_each_rank(list)
        """Episodes that the ranks were not given yet."""
        self.answers = self._for_each_rank(dict)
        """Completions that the ranks were not given yet, by the names of their requests."""
        self.num_failed = 0
        """The episodes that failed since the last call with one that did not."""

    def _for_each_rank(self, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(self.agents.world_size)]

    def run_episodes(self, prompts: DataProto) -> ResponsesFuture:
        """Begins n episodes for each of (B,) prompts, and returns the future of their batch."""
        with self.changed:
            self.num_calls += 1
            name = f"call {self.num_calls}"
        requests = self.rules.requests_of(prompts, name)
        call = EpisodeCall(self, prompts, requests)
        rows = rows_of(call.prompts)
        n = len(requests) // max(1, len(prompts))
        numbers = np.arange(len(prompts))
        ranks = _parts(numbers, self.agents.world_size)
        replicas = _parts(numbers, len(self.queue.loads))
        with self.changed:
            for number, request in enumerate(requests):
                row = number // n
                # Calls of one prompt, as those in flight, do not all go to the first rank.
                rank = (ranks[row] + self.num_calls) % self.agents.world_size
                replica = replicas[row] if self.queue.is_fixed else None
                self.places[request.name] = _Place(rank, replica)
                self.to_begin[rank].append(EpisodeSpec(request, rows[row]))
                self.call_of_episode[request.name] = call
            self.start_thread()
        return ResponsesFuture(call)

    def require_success(self, episodes: Sequence[Episode]) -> None:
        """Takes the episodes of a call. Raises AgentsFailed if all have failed, and with those of
        earlier calls they are as many as a step has."""
        if any(episode.ended != "failed" for episode in episodes):
            self.num_failed = 0
            return
        self.num_failed += len(episodes)
        if self.num_failed < self.episode_rules.num_of_step:
            return
        kind, text = episodes[-1].failures[-1]
        raise AgentsFailed(
            f"The last {self.num_failed} episodes failed, so there is nothing to train. The last "
            f"failure ({kind}): {text}. Repair it, and start the same command again."
        )

    def has_work(self) -> bool:
        return super().has_work() or bool(self.call_of_episode)

    def _exchange(self) -> bool:
        with self.changed:
            runs_episodes = bool(self.call_of_episode)
            begun = self.to_begin
            self.to_begin = self._for_each_rank(list)
            answers = self.answers
            self.answers = self._for_each_rank(dict)
        if not runs_episodes:
            return super()._exchange()
        if any(begun):
            self.agents.begin_episodes(PerRank(begun))
        self.collect_s = min(self.collect_s, EXCHANGE_S)
        news = self.agents.exchange.remote(PerRank(answers), EXCHANGE_S)
        # The ranks of both groups wait at the same time.
        is_left = super()._exchange()
        for rank, exchange in enumerate(news.get()):
            self._take(rank, exchange)
        return is_left

    def _collect(self) -> None:
        if self.sent:  # while all episodes use tools, there is nothing to collect
            super()._collect()

    def _take(self, rank: int, exchange: Exchange) -> None:
        """Takes the requests and episodes of a rank."""
        with self.changed:
            for request in exchange.requests:
                place = self.places.get(request.episode)
                if place is None:  # the episode has ended without waiting for it
                    continue
                place.replica = self.queue.place(request, place.replica)
                self.episode_of_request[request.name] = request.episode
            for name in exchange.aborted:
                if self.episode_of_request.pop(name, None):
                    self.aborted += self.queue.remove([name])
                    self.sent.discard(name)
            for ended in exchange.episodes:
                call = self.call_of_episode.pop(ended.name, None)
                if call is None:
                    continue
                del self.places[ended.name]
                call.episodes[ended.name] = ended
                call.add_span(rank, ended.started, ended.started + ended.seconds)
            self.changed.notify_all()

    def _ended(self, replica: int, name: str, completion: Completion) -> None:
        episode = self.episode_of_request.pop(name, None)
        if episode is None:
            super()._ended(replica, name, completion)
            return
        self.queue.ended(name)
        self.sent.discard(name)
        if place := self.places.get(episode):
            self.answers[place.rank][name] = completion

    def unfinished_calls(self) -> set[RequestCall]:
        calls = super().unfinished_calls() | set(self.call_of_episode.values())
        self.call_of_episode = {}
        self.places = {}
        self.episode_of_request = {}
        self.to_begin = self._for_each_rank(list)
        return calls

    def timeout_of(self, call: RequestCall, deadline_s: float) -> CallTimeout:
        if not isinstance(call, EpisodeCall):
            return super().timeout_of(call, deadline_s)
        late_ranks = set()
        for name, place in self.places.items():
            if self.call_of_episode.get(name) is call:
                late_ranks.add(place.rank)
        late = f"rank(s) {sorted(late_ranks)} of {self.agents.world_size}"
        return CallTimeout(self.agents.role, METHOD, deadline_s, late)

    def report(self, call: RequestCall) -> None:
        if not isinstance(call, EpisodeCall):
            super().report(call)
            return
        for rank, (started, ended) in sorted(call.spans.items()):
            self.agents.report(METHOD, rank, CallHeader(0, started, ended))


def _parts(numbers: np.ndarray, num_parts: int) -> list[int]:
    """Divides numbers into equal consecutive parts, and returns the part of each."""
    parts = np.array_split(numbers, num_parts)
    sizes = [len(part) for part in parts]
    return np.repeat(np.arange(num_parts), sizes).tolist()
