"""Calls of a rollout group as requests.

The driver sends the requests to replicas and collects the responses that have ended.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
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
"""How long a replica waits for a response to end, after one has ended or requests were sent. The
time doubles each time that none has ended."""
LONGEST_COLLECT_S = 0.4
"""The longest time that a replica waits for a response to end."""
_CLOSING_S = 5.0
"""The longest time that `close` waits for the thread to end."""
_LOCAL_PAUSE_S = 0.002
"""The pause between two collections from a group in this process, which cannot wait itself."""
_OWN_METHODS = ("submit_requests", "abort_requests", "collect_completions")
"""The methods that a router calls for `METHOD`, which errors name instead."""
METHOD = "generate_sequences"
"""The method that a call stands for, as errors and the timeline name it."""


def call_by_requests(method: BoundMethod, prompts: DataProto) -> "ResponsesFuture":
    """Calls `RolloutWorker.generate_sequences` with a batch by sending its requests to replicas."""
    return router_of(method.group).call(prompts)


def after_requests(method: BoundMethod, *args: Any, **kwargs: Any) -> Future[Any]:
    """Calls a method of the ranks after the requests of earlier calls were sent to them.

    With the argument `drain=False`, which the method gets too, it does not wait for that.
    """
    router = method.group.caller
    if router is not None and kwargs.get("drain", True):
        router.wait_until_sent(method.spec.name)
    return method.send(*args, **kwargs)


class ResponsesFuture(DataProtoFuture):
    """A future of the responses to a batch of prompts; `call` gives them as they end."""

    def __init__(self, call: "RequestCall") -> None:
        super().__init__(call, lambda outputs: outputs[0])
        self.call = call


class RequestCall(PendingCall):
    """A call of `generate_sequences`: a batch of prompts and the responses drawn so far.

    One thread of the driver may use `stream` and `wait`.
    """

    method = METHOD
    """The method that the call stands for, as errors and the timeline name it."""

    def __init__(
        self, router: "RequestRouter", prompts: DataProto, requests: Sequence[GenerationRequest]
    ) -> None:
        self.router = router
        self.group = router.group
        """The group whose ranks work on the call."""
        self.prompts = prompts.select()  # the caller may change its batch meanwhile
        self.requests = {request.name: request for request in requests}
        self.told = names_of_real(prompts, requests)
        self.error: Exception | None = None
        self.begin()

    def begin(self) -> None:
        """Begins without any response."""
        self.completions: dict[str, Completion] = {}
        self.unread: list[FinishedRequest] = []
        """The responses that have ended and that `stream` has not yielded yet."""
        self.begun = time.monotonic()
        self.spans: dict[int, tuple[float, float]] = {}
        """When each rank began and last ended something of this call, by `time.time()`."""
        self.batch: DataProto | None = None
        self.stored: Part | None = None

    def stream(self) -> Iterator[list[FinishedRequest]]:
        """Yields lists of responses as they end, without those of padding rows.

        Raises WorkerError, or CallTimeout after the group's deadline.
        """
        deadline_s = self.router.group.deadline_s
        started = time.monotonic()
        is_done = False
        while not is_done:
            unread, is_done = self.router.wait_for_more(self, started, deadline_s)
            if unread:
                yield unread

    def wait(self, timeout: float | None) -> list[DataProto]:
        """Waits for all responses and returns their batch, in a list.

        `timeout` is in seconds; None means the group's deadline.
        """
        if self.batch is None:
            deadline_s = timeout
            if deadline_s is None:
                deadline_s = self.router.group.deadline_s
            started = time.monotonic()
            is_done = False
            while not is_done:
                _, is_done = self.router.wait_for_more(self, started, deadline_s)
            self.batch = self.assembled()
            self.report()
        return [self.batch]

    def assembled(self) -> DataProto:
        """Returns the batch of the call, whose responses have all ended."""
        completions = [self.completions[name] for name in self.requests]
        return assemble(self.prompts, completions)

    def report(self) -> None:
        """Writes into the timeline when each rank worked on this call, which has ended."""
        for rank, (started, ended) in sorted(self.spans.items()):
            header = CallHeader(0, started, ended)
            self.group.report(self.method, rank, header)

    def timeout(self, deadline_s: float) -> CallTimeout:
        """Returns the error that says that this call is late, and at which ranks. The caller holds
        the lock."""
        late = f"rank(s) {sorted(self.late_ranks())} of {self.group.world_size}"
        return CallTimeout(self.group.role, self.method, deadline_s, late)

    def late_ranks(self) -> set[int]:
        """Returns the ranks that have requests of this call. The caller holds the lock."""
        router = self.router
        replica_of = router.queue.replica_of
        replicas = {replica_of[name] for name in self.requests if name in replica_of}
        return {router.mesh.collect_ranks[replica] for replica in replicas}

    def done(self) -> bool:
        return self.error is not None or len(self.completions) == len(self.requests)

    def parts(self) -> list[Part]:
        """Waits for the batch, and returns a reference to it in the object store, in a list."""
        (batch,) = self.wait(None)
        if self.stored is None:
            self.stored = self.router.group.put(batch)
        return [self.stored]

    def begin_again(self) -> None:
        """Discards all responses, and draws them again."""
        self.router.begin_again(self)


class RequestRouter:
    """Sends the requests of a group's calls to its replicas and collects the responses.

    A thread of the driver does this while requests are unfinished. Other threads make calls, wait
    for them and begin them again.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.mesh = group.mesh("rollout")
        self.rules: RequestRules = group.request_rules()[0]
        num_replicas = self.mesh.dp_size
        self.queue = RequestQueue(self.rules.routing, num_replicas, self.rules.num_slots)
        self.changed = threading.Condition()
        self.calls: dict[str, RequestCall] = {}
        """The call of each request that has not ended, by the request's name."""
        self.aborted: list[str] = []
        """The names of requests that replicas will be told to abort."""
        self.sent: set[str] = set()
        """The names of requests that were sent to replicas and have not ended."""
        self.num_calls = 0
        self.thread: threading.Thread | None = None
        """The thread that runs while requests are unfinished."""
        self.is_closing = False
        self.collect_s = COLLECT_S
        self.next_look = time.monotonic() + LOOK_S
        _ROUTERS.add(self)

    def call(self, prompts: DataProto) -> ResponsesFuture:
        """Begins to draw the responses to a batch of prompts, and returns their future."""
        requests = self.requests_of(prompts)
        call = RequestCall(self, prompts, requests)
        with self.changed:
            self._add(call)
        return ResponsesFuture(call)

    def requests_of(self, prompts: DataProto) -> list[GenerationRequest]:
        """Returns the requests of a new call, with names that no other call has."""
        with self.changed:
            self.num_calls += 1
            name = f"call {self.num_calls}"
        return self.rules.requests_of(prompts, name)

    def begin_again(self, call: RequestCall) -> None:
        """Aborts the requests of a call, discards its responses, and sends all requests again."""
        with self.changed:
            self.aborted += self.queue.remove(call.requests)
            self.sent -= call.requests.keys()
            call.begin()
            self._add(call)

    def _add(self, call: RequestCall) -> None:
        """Queues the requests of a call, and starts the thread if it does not run.

        The caller holds the lock.
        """
        requests = list(call.requests.values())
        if requests:
            n = len(requests) // len(call.prompts)
            self.queue.add(requests, n)
            self.start_thread()
        self.calls |= dict.fromkeys(call.requests, call)
        self.changed.notify_all()

    def start_thread(self) -> None:
        """Starts the thread unless it runs. The caller holds the lock."""
        if self.thread is not None:
            return
        self.thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self.thread.start()

    def wait_for_more(
        self, call: RequestCall, started: float, deadline_s: float
    ) -> tuple[list[FinishedRequest], bool]:
        """Waits until more responses of a call have ended.

        Raises the call's error, or CallTimeout `deadline_s` after `started`, a time of
        `time.monotonic()`.

        Returns:
            The responses that have ended since the last time, which can be none only if all have
            ended, and whether all have.
        """

        def has_more() -> bool:
            return bool(call.unread) or call.done()

        deadline = started + min(deadline_s, threading.TIMEOUT_MAX)  # it may be infinite
        with self.changed:
            left_s = max(0.0, deadline - time.monotonic())
            if not self.changed.wait_for(has_more, left_s):
                raise call.timeout(deadline_s)
            if call.error:
                raise call.error
            unread = call.unread
            call.unread = []
            return unread, call.done()

    def wait_until_sent(self, method: str) -> None:
        """Waits until all requests of earlier calls were sent to replicas.

        Raises CallTimeout, which names `method`, after the group's deadline.
        """
        deadline_s = self.group.deadline_s
        limit_s = min(deadline_s, threading.TIMEOUT_MAX)  # it may be infinite

        def num_unsent() -> int:
            return len(self.queue) - len(self.sent)

        with self.changed:
            if not self.changed.wait_for(lambda: num_unsent() == 0, limit_s):
                late = f"{num_unsent()} requests to be sent"
                raise CallTimeout(self.group.role, method, deadline_s, late)

    def wait_for_any(self, calls: Collection[RequestCall], timeout_s: float) -> None:
        """Waits until one of the calls is done, but not longer than `timeout_s`.

        Raises CallTimeout for a call that is past the group's deadline.
        """
        deadline_s = self.group.deadline_s

        def is_any_done() -> bool:
            return any(call.done() for call in calls)

        with self.changed:
            self.changed.wait_for(is_any_done, timeout=timeout_s)
            now = time.monotonic()
            for call in calls:
                is_late = now > call.begun + deadline_s
                if is_late and not call.done():
                    raise call.timeout(deadline_s)

    def ages(self) -> dict[str, int]:
        """Returns the engine steps since each unfinished request was submitted, by its name."""
        by_rank = self.group.request_ages()
        ages: dict[str, int] = {}
        for rank in self.mesh.collect_ranks:
            ages |= by_rank[rank]
        return ages

    def close(self) -> None:
        """Ends the thread, and waits for its end, but not longer than `_CLOSING_S`.

        Unfinished calls raise RuntimeError. So does every later call with requests: its first
        `_exchange` raises the error and sends nothing.
        """
        with self.changed:
            self.is_closing = True
            thread = self.thread
        if thread is not None:
            thread.join(_CLOSING_S)

    def _run(self) -> None:
        """Runs the thread until no request is unfinished. If a replica fails, all calls fail."""
        try:
            while self._exchange():
                pass
        # Those who wait for calls must learn of any error that ends the thread.
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Lets all calls raise an error. If a method of a rank raised it, the ranks still answer,
        and the requests of these calls are aborted there."""
        failure = self._named(error)
        with self.changed:
            for call in self.unfinished_calls():
                call.error = failure
            # The names of episodes' requests are in the queue alone, though `unfinished_calls`
            # returns their calls. Names that are in both count once.
            names = [*self.calls, *self.queue.replica_of]
            unfinished = dict.fromkeys(names)
            self.aborted += self.queue.remove(unfinished)
            self.calls = {}
            self.sent = set()
            self.thread = None
            self.changed.notify_all()
            aborted = self.aborted
        has_died = isinstance(error, WorkerDied)
        if has_died or not isinstance(error, WorkerError):  # the ranks may not answer
            return
        # An error here says nothing new, and the next exchange aborts these requests again.
        with contextlib.suppress(WorkerError):
            self.group.abort_requests(aborted)

    def unfinished_calls(self) -> set[RequestCall]:
        """Returns the calls that have not ended. `EpisodeRouter` adds those of its episodes, and
        forgets these episodes. The caller holds the lock."""
        return set(self.calls.values())

    def _named(self, error: BaseException) -> Exception:
        """Returns the error as one of `generate_sequences`, if a method of this router failed."""
        role = self.group.role
        if isinstance(error, WorkerError | CallTimeout) and error.role == role:
            if error.method not in _OWN_METHODS:
                return error
            if isinstance(error, WorkerError):
                return error.in_method(METHOD)
            return CallTimeout(role, METHOD, error.seconds, error.waiting_for)
        if isinstance(error, Exception):
            return error
        ended = RuntimeError(f"What sends requests to {role} was ended by {error!r}.")
        ended.__cause__ = error
        return ended

    def _exchange(self) -> bool:
        """Sends replicas what is new, and collects responses. Returns False if no request is
        left."""
        with self.changed:
            if self.is_closing:
                raise RuntimeError(
                    f"The run ended while {len(self.queue)} requests were unfinished."
                )
            aborted = list(self.aborted)
            # What each replica gets now: with `least_loaded` what it has room for, with `fixed` its
            # part of a call.
            taken = self.queue.take()
            if not (aborted or self.has_work()):
                self.thread = None
                return False
            self._begin_spans(taken)
        self._send(aborted, taken)
        self._collect()
        if time.monotonic() > self.next_look:
            self.group.look_for_stopped(METHOD)
            self.next_look = time.monotonic() + LOOK_S
        return True

    def has_work(self) -> bool:
        """Returns whether anything is unfinished. The caller holds the lock."""
        return len(self.queue) > 0

    def _begin_spans(self, taken: Sequence[Sequence[GenerationRequest]]) -> None:
        """Records for each call the time at which a replica first takes requests of it."""
        now = time.time()
        for replica, requests in enumerate(taken):
            for request in requests:
                call = self.calls.get(request.name)
                if call:
                    rank = self.mesh.collect_ranks[replica]
                    call.spans.setdefault(rank, (now, now))

    def _send(self, aborted: Sequence[str], taken: Sequence[Sequence[GenerationRequest]]) -> None:
        """Tells replicas which requests to abort, then sends each one its new requests.

        `taken` has one list for each replica; all ranks of a replica get the same list.
        """
        if aborted:
            self.group.abort_requests(aborted)
        if any(taken):
            taken_of_ranks = [taken[replica] for replica in self.mesh.dp_ranks]
            self.group.submit_requests(PerRank(taken_of_ranks))
            self.collect_s = COLLECT_S
        names = set()
        for requests in taken:
            for request in requests:
                names.add(request.name)
        with self.changed:
            del self.aborted[: len(aborted)]
            # A call may have begun again in the meantime, and then its names are in `aborted`.
            self.sent |= names & self.queue.replica_of.keys()
            self.sent -= set(self.aborted)
            self.changed.notify_all()

    def _collect(self) -> None:
        """Collects the responses that have ended on replicas.

        A group in this process cannot wait for them, so this pauses if there are none.
        """
        is_local = self.group.runs_at_once
        wait_s = self.collect_s
        if is_local:
            wait_s = 0.0
        by_rank = self.group.collect_completions(wait_s)
        answers = [by_rank[rank] for rank in self.mesh.collect_ranks]
        have_ended = False
        with self.changed:
            for replica, (completions, _num_left) in enumerate(answers):
                have_ended |= bool(completions)
                for name, completion in completions.items():
                    self._ended(replica, name, completion)
            self.changed.notify_all()
            # After this, so that a replica's loss costs no response that others have ended.
            for replica, (_completions, num_left) in enumerate(answers):
                self._require_none_lost(replica, num_left)
        if have_ended:
            self.collect_s = COLLECT_S
            return
        doubled_s = 2 * self.collect_s
        self.collect_s = min(doubled_s, LONGEST_COLLECT_S)
        if is_local:
            time.sleep(_LOCAL_PAUSE_S)

    def _require_none_lost(self, replica: int, num_left: int) -> None:
        """Raises RolloutError if a replica lost requests: it has none left, but some have not
        ended. `num_left` is the number of requests that it still has."""
        if num_left:
            return
        replica_of = self.queue.replica_of
        lost = [name for name in self.sent if replica_of[name] == replica]
        if lost:
            raise RolloutError(
                f"Replica {replica} of {self.group.role} lost {len(lost)} requests: {lost[:5]}."
            )

    def _ended(self, replica: int, name: str, completion: Completion) -> None:
        """Gives a response to its call, unless the request was aborted in the meantime."""
        if name in self.aborted or name not in self.calls:
            return
        self.queue.ended(name)
        self.sent.discard(name)
        call = self.calls.pop(name)
        call.completions[name] = completion
        if name in call.told:
            call.unread.append((call.requests[name], completion))
        rank = self.mesh.collect_ranks[replica]
        started, _ended = call.spans[rank]
        call.spans[rank] = (started, time.time())


_MAKING = threading.Lock()
_ROUTERS: "weakref.WeakSet[RequestRouter]" = weakref.WeakSet()
"""All routers of this process."""


def router_of(group: WorkerGroup) -> RequestRouter:
    """Returns the router of a rollout group, which is made at the first call.

    The group must have its engines.
    """
    if group.caller is None:
        router = RequestRouter(group)
        with _MAKING:
            group.caller = group.caller or router
    return group.caller


def close_routers() -> None:
    """Ends the threads of all routers. This precedes the end of the processes they talk to."""
    for router in list(_ROUTERS):
        router.close()
