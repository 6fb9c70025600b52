"""Which replica takes which request."""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from verl_like.workers.rollout.request import GenerationRequest

# Legend: n responses to a prompt.


class RequestQueue:
    """Requests on their way to replicas, each of which computes `num_slots` at once.

    With the routing `fixed` a replica takes an equal part of the prompts of a call, consecutive
    ones, and those of a call when the call before has ended: a function of the requests alone. With
    `least_loaded` requests wait in one queue until a replica has a free place. The next one goes to
    the replica that has most of them; further samples of the same prompt follow it, as long as
    there is room, because they share what is computed of the prompt. One replica takes everything
    at once.
    """

    def __init__(self, routing: str, num_replicas: int, num_slots: int) -> None:
        self.is_fixed = routing == "fixed"
        self.num_slots = num_slots
        self.calls: deque[list[list[GenerationRequest]]] = deque()
        """With `fixed`, calls that wait for the one before: the requests of each prompt."""
        self.waiting: deque[GenerationRequest] = deque()
        self.assigned: list[list[GenerationRequest]] = [[] for _ in range(num_replicas)]
        """By replica, those to be sent to it."""
        self.replica_of: dict[str, int] = {}
        """Of the requests that are assigned and have not ended, by name."""
        self.loads = [0] * num_replicas
        """Their number, by replica."""

    def __len__(self) -> int:
        """The requests that have not ended."""
        return (
            len(self.waiting)
            + len(self.replica_of)
            + sum(len(each) for call in self.calls for each in call)
        )

    def add(self, requests: Sequence[GenerationRequest], n: int) -> None:
        """Takes in the requests of a call, the n to a prompt next to each other."""
        if not self.is_fixed:
            self.waiting.extend(requests)
        elif requests:
            self.calls.append(
                [list(requests[start : start + n]) for start in range(0, len(requests), n)]
            )
            self._begin_next_call()

    def take(self) -> list[list[GenerationRequest]]:
        """The requests to send to each replica now, in order."""
        self._begin_next_call()
        self._fill()
        taken = self.assigned
        self.assigned = [[] for _ in self.loads]
        return taken

    def _begin_next_call(self) -> None:
        if not self.calls or self.replica_of:
            return
        prompts = self.calls.popleft()
        for replica, share in enumerate(np.array_split(np.arange(len(prompts)), len(self.loads))):
            for request in (each for prompt in share for each in prompts[prompt]):
                self._assign(request, replica)

    def _fill(self) -> None:
        num_slots = self.num_slots if len(self.loads) > 1 else float("inf")
        last_uid = ""
        replica = 0
        while self.waiting and min(self.loads) < num_slots:
            request = self.waiting.popleft()
            is_of_last_prompt = request.uid != "" and request.uid == last_uid
            if not is_of_last_prompt or self.loads[replica] >= num_slots:
                replica = self.loads.index(min(self.loads))
            self._assign(request, replica)
            last_uid = request.uid

    def _assign(self, request: GenerationRequest, replica: int) -> None:
        self.assigned[replica].append(request)
        self.replica_of[request.name] = replica
        self.loads[replica] += 1

    def ended(self, name: str) -> None:
        """A replica has no more to do with a request."""
        self.loads[self.replica_of.pop(name)] -= 1

    def remove(self, names: Collection[str]) -> list[str]:
        """Forgets requests; returns the names of those that a replica may have."""
        self.waiting = deque(request for request in self.waiting if request.name not in names)
        left = (
            [[each for each in prompt if each.name not in names] for prompt in call]
            for call in self.calls
        )
        self.calls = deque(call for call in left if any(call))
        assigned = [name for name in names if name in self.replica_of]
        for name in assigned:
            self.ended(name)
        self.assigned = [
            [request for request in share if request.name not in names] for share in self.assigned
        ]
        return assigned
