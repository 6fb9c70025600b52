"""The assignment of requests to replicas."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from verl_like.workers.rollout.request import GenerationRequest

# Legend: n responses to a prompt.


class RequestQueue:
    """The requests that have not ended, and the replica that each is assigned to.

    A replica computes `num_slots` requests at once. There are two kinds of routing:

    - `fixed`: the prompts of a call are split into equal consecutive parts, one for each replica. A
      call begins when the call before has ended. The assignment depends on the requests alone.
    - `least_loaded`: requests wait in one queue until a replica has a free slot. The next request
      goes to the replica with the most free slots. Further requests of the same prompt go to the
      same replica while it has free slots, because they share the computation of the prompt. If
      there is one replica, it takes all requests at once.
    """

    def __init__(self, routing: str, num_replicas: int, num_slots: int) -> None:
        self.is_fixed = routing == "fixed"
        self.num_slots = num_slots
        self.calls: deque[list[list[GenerationRequest]]] = deque()
        """With `fixed`, the calls that wait for the call before. A call is a list with the requests
        of each prompt."""
        self.waiting: deque[GenerationRequest] = deque()
        """With `least_loaded`, the requests that wait for a free slot."""
        self.assigned: list[list[GenerationRequest]] = [[] for _ in range(num_replicas)]
        """The requests that `take` will return for each replica."""
        self.replica_of: dict[str, int] = {}
        """The replica of each request that is assigned and has not ended, by the request's name."""
        self.loads = [0] * num_replicas
        """The number of such requests of each replica."""

    def __len__(self) -> int:
        """Returns the number of requests that have not ended."""
        number = len(self.waiting) + len(self.replica_of)
        for call in self.calls:
            for prompt in call:
                number += len(prompt)
        return number

    def add(self, requests: Sequence[GenerationRequest], n: int) -> None:
        """Adds the requests of a call, in which the n requests of a prompt are consecutive."""
        if not self.is_fixed:
            self.waiting.extend(requests)
            return
        if not requests:
            return
        starts = range(0, len(requests), n)
        call = [list(requests[start : start + n]) for start in starts]
        self.calls.append(call)
        self._begin_next_call()

    def place(self, request: GenerationRequest, replica: int | None) -> int:
        """Adds one request that waits for no others, on a replica or on the one with the fewest
        requests. Returns the replica."""
        if replica is None:
            fewest = min(self.loads)
            replica = self.loads.index(fewest)
        self._assign(request, replica)
        return replica

    def take(self) -> list[list[GenerationRequest]]:
        """Returns the requests to send to each replica now, in order."""
        self._begin_next_call()
        self._fill()
        taken = self.assigned
        self.assigned = [[] for _ in self.loads]
        return taken

    def _begin_next_call(self) -> None:
        """Assigns the next call of the routing `fixed`, if the call before has ended."""
        if not self.calls or self.replica_of:
            return
        prompts = self.calls.popleft()
        numbers = np.arange(len(prompts))
        shares = np.array_split(numbers, len(self.loads))
        for replica, share in enumerate(shares):
            for number in share:
                for request in prompts[number]:
                    self._assign(request, replica)

    def _fill(self) -> None:
        """Assigns waiting requests of the routing `least_loaded` to free slots."""
        num_slots = math.inf
        if len(self.loads) > 1:
            num_slots = self.num_slots
        last_uid = ""
        replica = 0
        while self.waiting and min(self.loads) < num_slots:
            request = self.waiting.popleft()
            shares_prompt = request.uid != "" and request.uid == last_uid
            if not shares_prompt or self.loads[replica] >= num_slots:
                replica = self.loads.index(min(self.loads))
            self._assign(request, replica)
            last_uid = request.uid

    def _assign(self, request: GenerationRequest, replica: int) -> None:
        """Lets `take` return a request for a replica."""
        self.assigned[replica].append(request)
        self.replica_of[request.name] = replica
        self.loads[replica] += 1

    def ended(self, name: str) -> None:
        """Frees the slot of a request, whose replica has no more to do with it."""
        replica = self.replica_of.pop(name)
        self.loads[replica] -= 1

    def remove(self, names: Collection[str]) -> list[str]:
        """Removes requests, and returns the names of those that were assigned to a replica.

        The replica may have these already.
        """
        waiting = _without(self.waiting, names)
        self.waiting = deque(waiting)
        calls = self.calls
        self.calls = deque()
        for call in calls:
            left = [_without(prompt, names) for prompt in call]
            if any(left):
                self.calls.append(left)
        self.assigned = [_without(share, names) for share in self.assigned]
        assigned = [name for name in names if name in self.replica_of]
        for name in assigned:
            self.ended(name)
        return assigned


def _without(
    requests: Iterable[GenerationRequest], names: Collection[str]
) -> list[GenerationRequest]:
    """Returns the requests that have other names."""
    return [request for request in requests if request.name not in names]
