"""Calls of a rollout group as requests: the driver sends them to replicas and collects what has
ended."""

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from verl_like.protocol import CallHeader, DataProto, DataProtoFuture, Future, Part, PendingCall
from verl_like.single_controller.dispatch import PerRank
from verl_like.single_controller.failure import CallTimeout, WorkerDied, WorkerError
from verl_like.single_controller.worker_group import LOOK_S, BoundMethod, WorkerGroup
from verl_like.workers.rollout.batch import RequestRules, assemble, names_of_real
from verl_like.workers.rollout.request import (
    Completion,
    FinishedRequest,
    GenerationRequest,
    RolloutError,
)
from verl_like.workers.rollout.routing import RequestQueue

COLLECT_S = 0.05
LONGEST_COLLECT_S = 0.4
"""How long a replica waits for a response to end, at first and at most. The time is doubled each
time that none has ended, and is the first again when one has, or when requests were sent."""
_LOCAL_PAUSE_S = 0.002
"""Between two looks for what has ended in this process, whose groups cannot wait for it."""
METHOD = "generate_sequences"
"""The method that calls are made of, as errors and the timeline name it."""


def call_by_requests(method: BoundMethod, prompts: DataProto) -> "ResponsesFuture":
    """`RolloutWorker.generate_sequences` of a batch, as requests."""
    return router_of(method.group).call(prompts)


def after_requests(
    method: BoundMethod, *args: Any, drain: bool = True, **kwargs: Any
) -> Future[Any]:
    """A call of the ranks; unless `drain` is False it waits until the requests of earlier calls
    were sent to them."""
    if not drain:
        return method.send(*args, drain=False, **kwargs)
    if method.group.caller is not None:
        method.group.caller.wait_until_sent(method.spec.name)
    return method.send(*args, **kwargs)


class ResponsesFuture(DataProtoFuture):
    """The responses to a batch of prompts, which `call` has drawn."""

    def __init__(self, call: "RequestCall") -> None:
        super().__init__(call, lambda outputs: outputs[0])
        self.call = call


class RequestCall(PendingCall):
    """A batch of prompts whose responses the replicas draw. `stream` and `wait` are for one thread
    of the driver."""

    def __init__(
        self, router: "RequestRouter", prompts: DataProto, requests: Sequence[GenerationRequest]
    ) -> None:
        self.router = router
        self.prompts = prompts.select()  # the caller may change its batch meanwhile
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
        self.stored: Part | None = None

    def stream(self) -> Iterator[list[FinishedRequest]]:
        """Lists of what has ended, as it comes. Raises WorkerError, or CallTimeout after the
        group's deadline."""
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
        if self.stored is None:
            self.stored = self.router.group.put(batch)
        return [self.stored]

    def begin_again(self) -> None:
        """Forgets what was drawn, and has it drawn anew."""
        self.router.begin_again(self)


class RequestRouter:
    """Sends the requests of a group's calls to its replicas. A thread of the driver does it while
    any are unfinished.

    Calls are made, waited for and begun again on other threads.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.mesh = group.mesh("rollout")
        self.own_methods = "submit_requests", "abort_requests", "collect_completions"
        self.rules: RequestRules = group.request_rules()[0]
        self.queue = RequestQueue(self.rules.routing, self.mesh.dp_size, self.rules.num_slots)
        self.changed = threading.Condition()
        self.calls: dict[str, RequestCall] = {}
        """The call of each request that has not ended, by its name."""
        self.aborted: list[str] = []
        """Requests that replicas are to forget."""
        self.sent: set[str] = set()
        """Requests that replicas have, and that have not ended."""
        self.num_calls = 0
        self.thread: threading.Thread | None = None
        """What runs while requests are unfinished."""
        self.is_closing = False
        self.collect_s = COLLECT_S
        self.next_look = time.monotonic() + LOOK_S
        _ROUTERS.add(self)

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
            self.sent -= call.requests.keys()
            call.completions = {}
            call.unread = []
            call.spans = {}
            call.batch = None
            call.stored = None
            call.begun = time.monotonic()
            self._add(call)

    def _add(self, call: RequestCall) -> None:
        requests = list(call.requests.values())
        if requests:
            self.queue.add(requests, n=len(requests) // len(call.prompts))
        self.calls |= dict.fromkeys(call.requests, call)
        self.changed.notify_all()
        if requests and self.thread is None:
            self.thread = threading.Thread(target=self._run, name="requests", daemon=True)
            self.thread.start()

    def wait_for_more(
        self, call: RequestCall, started: float, deadline_s: float
    ) -> tuple[list[FinishedRequest], bool]:
        """What has ended of a call since this was asked last, at least one unless all has, and
        whether all has.

        Raises the call's error, or CallTimeout `deadline_s` after `started`, a time of
        `time.monotonic()`.
        """
        with self.changed:
            left_s = max(0.0, started + deadline_s - time.monotonic())
            limit_s = None if math.isinf(left_s) else left_s
            if not self.changed.wait_for(lambda: call.unread or call.done(), timeout=limit_s):
                raise self._timeout(call, deadline_s)
            if call.error:
                raise call.error
            unread = call.unread
            call.unread = []
            return unread, call.done()

    def _timeout(self, call: RequestCall, deadline_s: float) -> CallTimeout:
        replica_of = self.queue.replica_of
        replicas = {replica_of[name] for name in call.requests if name in replica_of}
        ranks = sorted(self.mesh.collect_ranks[replica] for replica in replicas)
        late = f"rank(s) {ranks} of {self.group.world_size}"
        return CallTimeout(self.group.role, METHOD, deadline_s, late)

    def wait_until_sent(self, method: str) -> None:
        """Until replicas have all requests of the calls that were made, for a call of `method`.

        Raises CallTimeout after the group's deadline.
        """
        deadline_s = self.group.deadline_s
        limit_s = None if math.isinf(deadline_s) else deadline_s
        with self.changed:
            if not self.changed.wait_for(lambda: not self._num_unsent(), timeout=limit_s):
                late = f"{self._num_unsent()} requests to be sent"
                raise CallTimeout(self.group.role, method, deadline_s, late)

    def _num_unsent(self) -> int:
        return len(self.queue) - len(self.sent)

    def wait_for_any(self, calls: Collection[RequestCall], timeout_s: float) -> None:
        """Until one of the calls is done, `timeout_s` at most. Raises CallTimeout for one past the
        group's deadline."""
        deadline_s = self.group.deadline_s
        with self.changed:
            self.changed.wait_for(lambda: any(call.done() for call in calls), timeout=timeout_s)
            for call in calls:
                if not call.done() and time.monotonic() > call.begun + deadline_s:
                    raise self._timeout(call, deadline_s)

    def ages(self) -> dict[str, int]:
        """The steps of the engine since each unfinished request was submitted to it, by name."""
        by_rank = self.group.request_ages()
        return {
            name: age for rank in self.mesh.collect_ranks for name, age in by_rank[rank].items()
        }

    def report(self, call: RequestCall) -> None:
        """Puts a call that has ended into the timeline."""
        for replica, rank in enumerate(self.mesh.collect_ranks):
            if span := call.spans.get(replica):
                self.group.report(METHOD, rank, CallHeader(0, *span))

    def close(self, timeout_s: float) -> None:
        """Ends the thread, and waits for that, `timeout_s` at most; calls that are not done
        raise."""
        with self.changed:
            self.is_closing = True
            thread = self.thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        """The thread: until no request is unfinished. A failure of a replica is that of all
        calls."""
        try:
            while self._exchange():
                pass
        # Whatever ends the thread is told to those who wait for calls
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        failure = self._named(error)
        with self.changed:
            for call in set(self.calls.values()):
                call.error = failure
            self.aborted += self.queue.remove(list(self.calls))
            self.calls = {}
            self.sent = set()
            self.thread = None
            self.changed.notify_all()
            aborted = self.aborted
        if isinstance(error, WorkerError) and not isinstance(error, WorkerDied):  # the ranks answer
            # Told already, and told again before the next requests
            with contextlib.suppress(WorkerError):
                self.group.abort_requests(aborted)

    def _named(self, error: BaseException) -> Exception:
        """The error as one of `generate_sequences`, where a call that it is made of failed."""
        if isinstance(error, WorkerError | CallTimeout) and error.role == self.group.role:
            if error.method not in self.own_methods:
                return error
            if isinstance(error, WorkerError):
                return error.in_method(METHOD)
            return CallTimeout(error.role, METHOD, error.seconds, error.waiting_for)
        if isinstance(error, Exception):
            return error
        ended = RuntimeError(f"What sends requests to {self.group.role} was ended by {error!r}.")
        ended.__cause__ = error
        return ended

    def _exchange(self) -> bool:
        """Tells replicas what to forget and to take, and asks for what has ended. False if nothing
        is left."""
        with self.changed:
            if self.is_closing:
                raise RuntimeError(
                    f"The run ended while {len(self.queue)} requests were unfinished."
                )
            aborted = list(self.aborted)
            taken = self.queue.take()
            if not (aborted or len(self.queue)):
                self.thread = None
                return False
            self._begin_spans(taken)
        self._send(aborted, taken)
        self._collect()
        if time.monotonic() > self.next_look:
            self.group.look_for_stopped(METHOD)
            self.next_look = time.monotonic() + LOOK_S
        return True

    def _begin_spans(self, taken: Sequence[Sequence[GenerationRequest]]) -> None:
        now = time.time()
        for replica, requests in enumerate(taken):
            for call in {self.calls[request.name] for request in requests}:
                call.spans.setdefault(replica, (now, now))

    def _send(self, aborted: Sequence[str], taken: Sequence[Sequence[GenerationRequest]]) -> None:
        """Tells replicas which requests to forget, and then which ones to take, by replica."""
        if aborted:
            self.group.abort_requests(aborted)
        if any(taken):
            self.group.submit_requests(PerRank([taken[replica] for replica in self.mesh.dp_ranks]))
            self.collect_s = COLLECT_S
        with self.changed:
            del self.aborted[: len(aborted)]
            names = {request.name for requests in taken for request in requests}
            # Some may have been begun again meanwhile
            self.sent |= (names & self.calls.keys()) - {*self.aborted}
            self.changed.notify_all()

    def _collect(self) -> None:
        """Asks replicas for what has ended. A group in this process, which cannot wait for it, is
        asked more often."""
        is_local = self.group.runs_at_once
        by_rank = self.group.collect_completions(0.0 if is_local else self.collect_s)
        with self.changed:
            has_ended = self._take_in([by_rank[rank] for rank in self.mesh.collect_ranks])
        if is_local and not has_ended:
            time.sleep(_LOCAL_PAUSE_S)
        self.collect_s = COLLECT_S if has_ended else min(2 * self.collect_s, LONGEST_COLLECT_S)

    def _take_in(self, answers: Sequence[tuple[Mapping[str, Completion], int]]) -> bool:
        """Takes what has ended on each replica, which says how many requests it still has; returns
        whether anything has. Raises RolloutError for a lost request."""
        for replica, (completions, _) in enumerate(answers):
            for name, completion in completions.items():
                self._ended(replica, name, completion)
        self.changed.notify_all()
        for replica, (_, num_left) in enumerate(answers):
            if num_left:
                continue
            if lost := [name for name in self.sent if self.queue.replica_of[name] == replica]:
                raise RolloutError(
                    f"Replica {replica} of {self.group.role} lost {len(lost)} requests: {lost[:5]}."
                )
        return any(completions for completions, _ in answers)

    def _ended(self, replica: int, name: str, completion: Completion) -> None:
        if name in self.aborted or name not in self.calls:  # it was begun again meanwhile
            return
        self.queue.ended(name)
        self.sent.discard(name)
        call = self.calls.pop(name)
        call.completions[name] = completion
        if name in call.told:
            call.unread.append((call.requests[name], completion))
        started, _ = call.spans[replica]
        call.spans[replica] = started, time.time()


_MAKING = threading.Lock()
_ROUTERS: "weakref.WeakSet[RequestRouter]" = weakref.WeakSet()
"""Those of this process."""


def router_of(group: WorkerGroup) -> RequestRouter:
    """The router of a rollout group, whose engines are there."""
    if group.caller is None:
        router = RequestRouter(group)
        with _MAKING:
            group.caller = group.caller or router
    return group.caller


def close_routers(timeout_s: float = 5.0) -> None:
    """Ends the threads of all routers, before what they talk to ends."""
    for router in list(_ROUTERS):
        router.close(timeout_s)
