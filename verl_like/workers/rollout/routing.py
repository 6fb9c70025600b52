"""Which replica takes which request."""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from verl_like.workers.rollout.request import GenerationRequest

# Legend: R replicas, n responses to a prompt.


class RequestQueue:
    """Requests on their way to R replicas, each of which computes `num_slots` at once.

    With the routing `fixed` a replica takes an equal part of the prompts of a call, consecutive ones, at once: a
    function of the requests alone. With `least_loaded` requests wait in one queue until a replica has a free place, and
    the next one goes to the replica that has most of them.
    """

    def __init__(self, routing: str, num_replicas: int, num_slots: int) -> None:
        self.routing, self.num_slots = routing, num_slots
        self.waiting: deque[GenerationRequest] = deque()
        self.assigned: list[list[GenerationRequest]] = [[] for _ in range(num_replicas)]
        """By replica, those to be sent to it."""
        self.replica_of: dict[str, int] = {}
        """Of the requests that are assigned and have not ended, by name."""
        self.loads = [0] * num_replicas
        """Their number, by replica."""

    def __len__(self) -> int:
        """The requests that have not ended."""
        return len(self.waiting) + len(self.replica_of)

    def add(self, requests: Sequence[GenerationRequest], n: int) -> None:
        """Takes in the requests of a call, the n to a prompt next to each other."""
        if self.routing == "least_loaded":
            self.waiting.extend(requests)
            return
        prompts = np.arange(len(requests) // n)
        for replica, share in enumerate(np.array_split(prompts, len(self.loads))):
            for request in requests[share[0] * n : (share[-1] + 1) * n] if len(share) else ():
                self._assign(request, replica)

    def take(self) -> list[list[GenerationRequest]]:
        """The requests to send to each replica now, in order."""
        while self.waiting and (load := min(self.loads)) < self.num_slots:
            self._assign(self.waiting.popleft(), self.loads.index(load))
        taken, self.assigned = self.assigned, [[] for _ in self.loads]
        return taken

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
        assigned = [name for name in names if name in self.replica_of]
        for name in assigned:
            self.ended(name)
        self.assigned = [[request for request in share if request.name not in names] for share in self.assigned]
        return assigned
