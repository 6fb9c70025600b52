"""The driver's side of episodes: it gives them to the ranks of the agents, and the requests of
these ranks to the replicas of the rollout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_like.protocol import DataProto, DataProtoFuture
from verl_like.single_controller.dispatch import PerRank
from verl_like.single_controller.worker_group import BoundMethod, WorkerGroup
from verl_like.workers.agents.batch import EpisodeRules, assemble_episodes, rows_of
from verl_like.workers.agents.episode import AgentsFailed, Episode, EpisodeSpec
from verl_like.workers.agents.runner import Exchange
from verl_like.workers.rollout.request import Completion, FinishedRequest, GenerationRequest
from verl_like.workers.rollout.router import RequestCall, RequestRouter, ResponsesFuture

EXCHANGE_S = 0.02
"""The longest time that a rank or a replica waits for something new while episodes run."""

OnEpisodes = Callable[[DataProto, Sequence[Episode]], None]
"""Called with the prompts of a call, and with its episodes once all have ended."""


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

    method = "run_episodes"
    router: "EpisodeRouter"

    def __init__(
        self, router: "EpisodeRouter", prompts: DataProto, requests: Sequence[GenerationRequest]
    ) -> None:
        super().__init__(router, prompts, requests)
        self.group = router.agents
        self.episodes: dict[str, Episode] = {}

    def stream(self) -> Iterator[list[FinishedRequest]]:
        """Yields nothing: an episode is scored when all are there."""
        return iter(())

    def add(self, episode: Episode, rank: int) -> None:
        """Adds an episode that has ended on a rank, and the time by `time.time()` that it took."""
        self.episodes[episode.name] = episode
        started = episode.started
        ended = started + episode.seconds
        first, last = self.spans.get(rank, (started, ended))
        self.spans[rank] = (min(first, started), max(last, ended))

    def done(self) -> bool:
        return self.error is not None or len(self.episodes) == len(self.requests)

    def assembled(self) -> DataProto:
        router = self.router
        episodes = [self.episodes[name] for name in self.requests]
        router.on_episodes(self.prompts, episodes)
        router.require_success(episodes)
        return assemble_episodes(self.prompts, episodes, router.episode_rules)

    def late_ranks(self) -> set[int]:
        """Returns the ranks that run episodes of this call. The caller holds the lock."""
        all_running = self.router.running.values()
        return {running.rank for running in all_running if running.call is self}


@dataclass
class _Running:
    """An episode that has not ended."""

    call: EpisodeCall
    rank: int
    """The rank of the agents that runs it."""
    replica: int | None = None
    """The replica of the rollout that takes all its requests, because it has their prompts in its
    cache. None before the first request, unless the routing is fixed."""


class EpisodeRouter(RequestRouter):
    """A router that runs episodes, too. They run on the ranks of the agents, and their requests go
    to the replicas beside those of other calls."""

    def __init__(self, rollout: WorkerGroup, agents: WorkerGroup, on_episodes: OnEpisodes) -> None:
        super().__init__(rollout)
        self.agents = agents
        self.on_episodes = on_episodes
        self.episode_rules: EpisodeRules = agents.episode_rules()[0]
        self.running: dict[str, _Running] = {}
        """The episodes that have not ended, by their names."""
        self.episode_of_request: dict[str, str] = {}
        """The name of the episode of each unfinished request that one has made."""
        self.num_failed = 0
        """The episodes that failed since the last call with one that did not."""
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        """Forgets what the ranks were not given yet. The caller holds the lock."""
        ranks = range(self.agents.world_size)
        self.to_begin: list[list[EpisodeSpec]] = [[] for _ in ranks]
        """For each rank, episodes to begin."""
        self.answers: list[dict[str, Completion]] = [{} for _ in ranks]
        """For each rank, completions by the names of their requests."""

    def run_episodes(self, prompts: DataProto) -> ResponsesFuture:
        """Begins n episodes for each of (B,) prompts, and returns the future of their batch."""
        requests = self.requests_of(prompts)
        call = EpisodeCall(self, prompts, requests)
        rows = rows_of(call.prompts)
        num_prompts = len(prompts)
        num_ranks = self.agents.world_size
        num_replicas = len(self.queue.loads)
        n = len(requests) // max(1, num_prompts)
        ranks = _parts(num_prompts, num_ranks)
        replicas = _parts(num_prompts, num_replicas)
        with self.changed:
            for number, request in enumerate(requests):
                row = number // n
                # Calls of one prompt, as those in flight, do not all go to the first rank.
                rank = (ranks[row] + self.num_calls) % num_ranks
                running = _Running(call, rank)
                if self.queue.is_fixed:
                    running.replica = replicas[row]
                self.running[request.name] = running
                spec = EpisodeSpec(request, rows[row])
                self.to_begin[rank].append(spec)
            self.start_thread()
        return ResponsesFuture(call)

    def require_success(self, episodes: Sequence[Episode]) -> None:
        """Takes the episodes of a call. Raises AgentsFailed if all have failed, and with those of
        earlier calls they are as many as a step has."""
        have_failed = [episode.ended == "failed" for episode in episodes]
        if not all(have_failed):
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
        return super().has_work() or bool(self.running)

    def _exchange(self) -> bool:
        with self.changed:
            runs_episodes = bool(self.running)
            begun = self.to_begin
            answers = self.answers
            self._empty_outbox()
        if not runs_episodes:
            return super()._exchange()
        self.collect_s = min(self.collect_s, EXCHANGE_S)
        news = self.agents.exchange.remote(PerRank(begun), PerRank(answers), EXCHANGE_S)
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
                self._place(request)
            for name in exchange.aborted:
                self._abort(name)
            for episode in exchange.episodes:
                ended = self.running.pop(episode.name, None)
                if ended:
                    ended.call.add(episode, rank)
            self.changed.notify_all()

    def _place(self, request: GenerationRequest) -> None:
        """Gives a request to the replica of its episode. The caller holds the lock."""
        running = self.running.get(request.episode)
        if running is None:  # the episode has ended without waiting for it
            return
        running.replica = self.queue.place(request, running.replica)
        self.episode_of_request[request.name] = request.episode

    def _abort(self, name: str) -> None:
        """Forgets a request that has not ended. The caller holds the lock."""
        is_unfinished = self.episode_of_request.pop(name, None)
        if is_unfinished:
            self.aborted += self.queue.remove([name])
            self.sent.discard(name)

    def _ended(self, replica: int, name: str, completion: Completion) -> None:
        episode = self.episode_of_request.pop(name, None)
        if episode is None:
            super()._ended(replica, name, completion)
            return
        self.queue.ended(name)
        self.sent.discard(name)
        running = self.running.get(episode)
        if running:
            self.answers[running.rank][name] = completion

    def unfinished_calls(self) -> set[RequestCall]:
        calls = super().unfinished_calls()
        calls.update(running.call for running in self.running.values())
        self.running = {}
        self.episode_of_request = {}
        self._empty_outbox()
        return calls


def _parts(num_rows: int, num_parts: int) -> list[int]:
    """Divides rows into equal consecutive parts, and returns the part of each row."""
    parts = np.array_split(range(num_rows), num_parts)
    sizes = [len(part) for part in parts]
    return np.repeat(range(num_parts), sizes).tolist()
