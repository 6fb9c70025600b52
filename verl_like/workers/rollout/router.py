"""Calls of a rollout group as requests: the driver sends them to replicas and collects what has ended."""

import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from verl_like.protocol import CallHeader, DataProto, DataProtoFuture, Part, PendingCall
from verl_like.single_controller.dispatch import PerRank
from verl_like.single_controller.failure import CallTimeout, WorkerError
from verl_like.workers.rollout.batch import RequestRules, assemble, names_of_real
from verl_like.workers.rollout.request import Completion, FinishedRequest, GenerationRequest
from verl_like.workers.rollout.routing import RequestQueue

COLLECT_S, LONGEST_COLLECT_S = 0.05, 0.4
"""How long a replica waits for a response to end before it tells the driver that there is none. While that is so, and
no request comes, the driver doubles the one until it is the other."""
METHOD = "generate_sequences"
"""The method that calls are made of, as errors and the timeline name it."""


def call_by_requests(group: Any, prompts: DataProto) -> "ResponsesFuture":
    """`RolloutWorker.generate_sequences` of a batch, as requests."""
    return router_of(group).call(prompts)


class ResponsesFuture(DataProtoFuture):
    """The responses to a batch of prompts, which `call` has drawn."""

    def __init__(self, call: "RequestCall") -> None:
        super().__init__(call, lambda outputs: outputs[0])
        self.call = call


class RequestCall(PendingCall):
    """A batch of prompts whose responses the replicas draw. `stream` and `wait` are for one thread of the driver."""

    def __init__(self, router: "RequestRouter", prompts: DataProto, requests: Sequence[GenerationRequest]) -> None:
        self.router, self.prompts = router, prompts
        self.requests = {request.name: request for request in requests}
        self.told = names_of_real(prompts, requests)
        self.completions: dict[str, Completion] = {}
        self.unread: list[FinishedRequest] = []
        """What `stream` has not given yet."""
        self.error: Exception | None = None
        self.begun = time.monotonic()
        self.spans: dict[int, tuple[float, float]] = {}
        """When each replica drew, by `time.time()`."""
        self.batch: DataProto | None = None

    def stream(self) -> Iterator[list[FinishedRequest]]:
        """Lists of what has ended, as it comes. Raises WorkerError, or CallTimeout after the group's deadline."""
        deadline_s = self.router.group.deadline_s
        started = time.monotonic()
        while True:
            unread, is_done = self.router.wait_for_more(self, started, deadline_s)
            if unread:
                yield unread
            if is_done:
                return

    def wait(self, timeout: float | None) -> list[DataProto]:
        """The batch of responses."""
        deadline_s = self.router.group.deadline_s if timeout is None else timeout
        started = time.monotonic()
        is_done = self.batch is not None
        while not is_done:
            _, is_done = self.router.wait_for_more(self, started, deadline_s)
        if self.batch is None:
            self.batch = assemble(self.prompts, [self.completions[name] for name in self.requests])
            self.router.report(self)
        return [self.batch]

    def finish(self) -> None:
        self.wait(None)

    def done(self) -> bool:
        return self.error is not None or len(self.completions) == len(self.requests)

    def parts(self) -> list[Part]:
        """A reference to the batch, which this waits for."""
        (batch,) = self.wait(None)
        return [self.router.group.put(batch)]

    def begin_again(self) -> None:
        """Forgets what was drawn, and has it drawn anew."""
        self.router.begin_again(self)


class RequestRouter:
    """Sends the requests of a group's calls to its replicas. A thread of the driver does it while any are unfinished.

    Calls are made, waited for and begun again on other threads.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.mesh = group.mesh("rollout")
        self.rules: RequestRules = group.request_rules()[0]
        self.queue = RequestQueue(self.rules.routing, self.mesh.dp_size, self.rules.num_slots)
        self.changed = threading.Condition()
        self.calls: dict[str, RequestCall] = {}
        """The call of each request that has not ended, by its name."""
        self.aborted: list[str] = []
        """Requests that replicas are to forget."""
        self.num_calls = 0
        self.is_running = False
        self.collect_s = COLLECT_S

    def call(self, prompts: DataProto) -> ResponsesFuture:
        """Has the responses to a batch of prompts drawn."""
        with self.changed:
            self.num_calls += 1
            name = f"call {self.num_calls}"
        requests = self.rules.requests_of(prompts, name)
        call = RequestCall(self, prompts, requests)
        with self.changed:
            self._add(call)
        return ResponsesFuture(call)

    def begin_again(self, call: RequestCall) -> None:
        """Has all responses of a call drawn anew."""
        with self.changed:
            self.aborted += self.queue.remove(call.requests)
            call.completions, call.unread = {}, []
            call.begun = time.monotonic()
            self._add(call)

    def _add(self, call: RequestCall) -> None:
        requests = list(call.requests.values())
        self.queue.add(requests, n=len(requests) // max(1, len(call.prompts)))
        self.calls |= dict.fromkeys(call.requests, call)
        self.changed.notify_all()
        if requests and not self.is_running:
            self.is_running = True
            threading.Thread(target=self._run, name="requests", daemon=True).start()

    def wait_for_more(self, call: RequestCall, started: float, deadline_s: float) -> tuple[list[FinishedRequest], bool]:
        """What has ended of a call since this was asked last, at least one unless all has, and whether all has.

        Raises the call's error, or CallTimeout `deadline_s` after `started`, a time of `time.monotonic()`.
        """
        with self.changed:
            left_s = max(0.0, started + deadline_s - time.monotonic())
            limit_s = None if math.isinf(left_s) else left_s
            if not self.changed.wait_for(lambda: call.unread or call.done(), timeout=limit_s):
                raise self._timeout(call, deadline_s)
            if call.error:
                raise call.error
            unread, call.unread = call.unread, []
            return unread, call.done()

    def _timeout(self, call: RequestCall, deadline_s: float) -> CallTimeout:
        replica_of = self.queue.replica_of
        replicas = {replica_of[name] for name in call.requests if name in replica_of}
        ranks = sorted(self.mesh.collect_ranks[replica] for replica in replicas)
        late = f"rank(s) {ranks} of {self.group.world_size}"
        return CallTimeout(self.group.role, METHOD, deadline_s, late)

    def wait_for_any(self, calls: Collection[RequestCall], timeout_s: float) -> None:
        """Until one of the calls is done, `timeout_s` at most. Raises CallTimeout for one past the group's deadline."""
        deadline_s = self.group.deadline_s
        with self.changed:
            if self.changed.wait_for(lambda: any(call.done() for call in calls), timeout=timeout_s):
                return
            for call in calls:
                if time.monotonic() > call.begun + deadline_s:
                    raise self._timeout(call, deadline_s)

    def ages(self) -> dict[str, int]:
        """The steps of the engine since each unfinished request was submitted to it, by name."""
        by_rank = self.group.request_ages()
        return {name: age for rank in self.mesh.collect_ranks for name, age in by_rank[rank].items()}

    def report(self, call: RequestCall) -> None:
        """Puts a call that has ended into the timeline."""
        for replica, rank in enumerate(self.mesh.collect_ranks):
            if span := call.spans.get(replica):
                self.group.report(METHOD, rank, CallHeader(0, *span))

    def _run(self) -> None:
        """The thread: until no request is unfinished. A failure of a replica is that of all calls."""
        try:
            while self._exchange():
                pass
        except Exception as error:
            with self.changed:
                failure = error.in_method(METHOD) if isinstance(error, WorkerError) else error
                for call in set(self.calls.values()):
                    call.error = failure
                self.aborted += self.queue.remove(self.calls)  # told before the requests of a later call
                self.calls = {}
                self.is_running = False
                self.changed.notify_all()

    def _exchange(self) -> bool:
        """Tells replicas what to take and to forget, and asks for what has ended. False if nothing is left."""
        with self.changed:
            aborted, taken = self.aborted, self.queue.take()
            self.aborted = []
            if not (aborted or len(self.queue)):
                self.is_running = False
                return False
            now = time.time()
            for replica, requests in enumerate(taken):
                for call in {self.calls[request.name] for request in requests}:
                    call.spans.setdefault(replica, (now, now))
        if aborted:
            self.group.abort_requests(aborted)
        if any(taken):
            by_rank = PerRank([taken[replica] for replica in self.mesh.dp_ranks])
            self.group.submit_requests(by_rank)
            self.collect_s = COLLECT_S
        by_rank_ended = self.group.collect_completions(self.collect_s)
        has_ended = any(by_rank_ended[rank].names for rank in self.mesh.collect_ranks)
        self.collect_s = COLLECT_S if has_ended else min(2 * self.collect_s, LONGEST_COLLECT_S)
        with self.changed:
            for replica, rank in enumerate(self.mesh.collect_ranks):
                for name, completion in by_rank_ended[rank].unpacked().items():
                    self._ended(replica, name, completion)
            self.changed.notify_all()
        return True

    def _ended(self, replica: int, name: str, completion: Completion) -> None:
        if name in self.aborted or name not in self.calls:  # it was begun again meanwhile
            return
        self.queue.ended(name)
        call = self.calls.pop(name)
        call.completions[name] = completion
        if name in call.told:
            call.unread.append((call.requests[name], completion))
        started, _ = call.spans[replica]
        call.spans[replica] = started, time.time()


_MAKING = threading.Lock()


def router_of(group: Any) -> RequestRouter:
    """The router of a rollout group, whose engines are there."""
    with _MAKING:
        if group.caller is None:
            group.caller = RequestRouter(group)
        return group.caller
