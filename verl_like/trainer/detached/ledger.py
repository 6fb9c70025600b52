"""The ledger of a detached run: hands out prompts so that none is trained too late, and accounts
for each."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from verl_like.trainer.config.detached import DetachedBlock


@dataclass(frozen=True)
class Ticket:
    """The permission to make the group of samples of one prompt."""

    number: int
    """0, 1, ... in the order of the run; the maker derives from it which row of the data set this
    is."""
    attempt: int
    """0 at first, 1 more each time the prompt is given out again."""
    trainer: int
    """Index of the trainer whose buffer the samples go to."""


@dataclass
class _Open:
    """A prompt that was given out and is not trained yet."""

    trainer: int
    attempt: int
    maker: str
    version: int
    """A lower bound of the version of its oldest token; once it is delivered, that version."""
    arrival: int | None = None
    """How many groups were delivered before; None until it is."""
    taken_at: int | None = None
    """Version of the trainer when it took the group."""


class PromptLedger:
    """Gives tickets to makers, says which groups a trainer may take, and counts what becomes of
    every prompt.

    Trainers train one model in step: each takes b = batch_size / num_trainers groups in the step
    after version v, which makes version v + 1. With S = max_staleness, a group whose oldest token
    has version w is due at version w + S.

    Nothing is trained later: a ticket is given out only while fewer than (w + S + 1) * b of its
    trainer are trained or open (AReaL's rule, arXiv:2505.24298), so at most (d + 1) * b groups are
    ever due by version d, and `choose` leaves no more of them than the steps up to d have places
    for, which the earliest due first always achieves. Nobody waits for ever: what `choose` waits
    for is with a maker, and one with the weights of version v may start (v + 1) * b.

    The brake: while the effective sample size of any trainer's last step is below the limit, S in
    the rule for tickets is u - 1 with u = update_steps, so that makers wait for newer weights.
    Still nobody waits for ever: the push of version v is followed by that of v + u at the latest,
    which needs (v + u) * b groups, and as many may be started with version v.

    Methods neither wait nor call anything. Prompts whose maker is lost come first when tickets are
    given out again.

    `num_steps` are those of the run, `batch_size` the prompts of a step over all trainers, among
    whom it divides. `saved` is the `state` of a run that goes on.
    """

    def __init__(
        self,
        num_steps: int,
        batch_size: int,
        detached: DetachedBlock,
        saved: Mapping[str, Any] | None = None,
        *,
        max_staleness: int = 0,
    ) -> None:
        self.num_steps = num_steps
        self._last_step = num_steps
        self.detached = detached
        self.max_staleness = max_staleness
        num_trainers = detached.num_trainers
        self.share = batch_size // num_trainers
        self._effective_sample_sizes = [1.0] * num_trainers  # in the last step of each trainer
        self._open: dict[int, _Open] = {}
        self._again: list[tuple[int, int]] = []  # a heap of (number, attempt)
        self._next_number = 0
        self._num_delivered = 0
        self._dropped: Counter[str] = Counter()
        self._lost: dict[str, float] = {}  # maker -> when, by time.monotonic()
        # Of each trainer: groups trained or open, in its buffer, taken, trained.
        self._live, self._buffered, self._taken, self._trained = (
            [0] * num_trainers for _ in range(4)
        )
        # (version, coefficient), in the order in which they were kept
        self._kl_coefs: list[tuple[int, float]] = []
        if saved:
            self._live, self._taken, self._trained = (list(saved["trained"]) for _ in range(3))
            # Sorted, which is a heap
            self._again = [(number, attempt) for number, attempt in saved["unfinished"]]
            self._next_number, self._dropped = saved["next_number"], Counter(saved["dropped"])
            self._effective_sample_sizes = list(saved["effective_sample_sizes"])
            self._kl_coefs = [(version, kl_coef) for version, kl_coef in saved["kl_coefs"]]

    def state(self) -> dict[str, Any]:
        """What a run that goes on after the steps trained so far has to know, as JSON; asked for
        when a step is done.

        Prompts that are open are `unfinished`: they are given out again, with their attempts.
        """
        return {
            "trained": list(self._trained),
            "unfinished": sorted(
                [*self._again, *((number, entry.attempt) for number, entry in self._open.items())]
            ),
            "next_number": self._next_number,
            "dropped": dict(self._dropped),
            "effective_sample_sizes": list(self._effective_sample_sizes),
            # Not that of a maker which has begun the next step.
            "kl_coefs": [
                each for each in self._kl_coefs if each[0] * self.share < min(self._trained)
            ][-1:],
        }

    def keep_kl_coef(self, version: int, kl_coef: float) -> None:
        """A maker's coefficient of the KL penalty after what it made with weights of `version` and
        sends next."""
        self._kl_coefs.append((version, kl_coef))

    def kl_coef(self) -> float | None:
        """The coefficient that was kept last, with which a maker goes on."""
        return self._kl_coefs[-1][1] if self._kl_coefs else None

    def end(self) -> int:
        """Ends the run after the first step that no trainer has done yet; returns it."""
        self._last_step = min(self._last_step, max(self._trained) // self.share + 1)
        return self._last_step

    def last_step(self) -> int:
        """The step after which the run ends. It is the same for all trainers that ask after they
        did a step."""
        return self._last_step

    def has_trained_all(self) -> bool:
        """Whether all trainers have trained all steps; they may still write their checkpoints."""
        return min(self._trained) == self._last_step * self.share

    @property
    def is_braking(self) -> bool:
        """Whether makers wait for newer weights than `max_staleness` alone asks for."""
        limit = self.detached.min_effective_sample_size
        # Not `size < limit`, because a size may be NaN.
        return limit > 0 and any(not size >= limit for size in self._effective_sample_sizes)

    def take(self, maker: str, version: int, limit: int) -> list[Ticket] | None:
        """At most `limit` tickets that `maker` may start now with weights of `version`.

        Empty where it has to wait for newer weights; None once all steps are trained, and for a
        maker that is lost.
        """
        if maker in self._lost or self.has_trained_all():
            return None
        ahead = self.detached.update_steps if self.is_braking else self.max_staleness + 1
        allowed = min(version + ahead, self._last_step) * self.share
        tickets: list[Ticket] = []
        while len(tickets) < limit:
            free = [trainer for trainer, live in enumerate(self._live) if live < allowed]
            if not free:
                break
            # Round robin: the one that was given the fewest.
            waiting = self._buffered if self.detached.routing == "least_loaded" else self._live
            trainer = min(free, key=lambda index: (waiting[index], self._live[index], index))
            number, attempt = heappop(self._again) if self._again else (self._next_number, 0)
            self._next_number = max(self._next_number, number + 1)
            self._open[number] = _Open(trainer, attempt, maker, version)
            self._live[trainer] += 1
            tickets.append(Ticket(number, attempt, trainer))
        return tickets

    def deliver(self, maker: str, groups: Sequence[tuple[int, int, int]]) -> list[int]:
        """(number, attempt, version of the oldest token) of groups that have come -> the numbers to
        keep.

        A group is refused if its prompt was given to somebody else meanwhile. Raises ValueError for
        a token older than the weights with which the ticket was asked for, because then it may come
        too late.
        """
        kept = []
        for number, attempt, oldest in groups:
            if not self._is_with(maker, number, attempt):
                continue
            entry = self._open[number]
            if oldest < entry.version:
                raise ValueError(
                    f"{maker} asked for prompt {number} with version {entry.version}, but its "
                    f"oldest token is of version {oldest}; ask for tickets with the version that "
                    "generates."
                )
            entry.version = oldest
            entry.arrival = self._num_delivered
            self._num_delivered += 1
            self._buffered[entry.trainer] += 1
            kept.append(number)
        return kept

    def renew(self, maker: str, tickets: Sequence[tuple[int, int]], version: int) -> None:
        """(number, attempt) that the maker begins again with weights of `version`; no older token
        is left of them."""
        for number, attempt in tickets:
            if self._is_with(maker, number, attempt):
                self._open[number].version = max(self._open[number].version, version)

    def lost(self, maker: str) -> None:
        """The maker died: what it started and did not deliver is given out again, or dropped after
        the last attempt.

        Its name is never used again, because a process that was stopped may go on for a moment.
        """
        self._lost[maker] = time.monotonic()
        for number in [
            n for n, entry in self._open.items() if entry.maker == maker and entry.arrival is None
        ]:
            entry = self._open.pop(number)
            self._live[entry.trainer] -= 1
            if entry.attempt + 1 < self.detached.max_attempts:
                heappush(self._again, (number, entry.attempt + 1))
            else:
                self._dropped["maker_lost"] += 1

    def choose(self, trainer: int, version: int, num_groups: int) -> list[int] | None:
        """Numbers, ascending, of `num_groups` delivered groups for the step after `version`; None
        while it must wait.

        Those due first, then in the order in which they came. A step may be taken in several parts;
        what is due may wait for the last. Trainers wait for each other here, and not in the middle
        of a step.
        """
        in_step = [each for each, taken in enumerate(self._taken) if taken == self._taken[trainer]]
        chosen = {each: self._choice(each, version, num_groups) for each in in_step}
        if not all(chosen.values()):
            return None
        numbers = chosen[trainer]
        for number in numbers:
            entry = self._open[number]
            assert 0 <= version - entry.version <= self.max_staleness, (number, entry, version)
            entry.taken_at = version
        self._taken[trainer] += num_groups
        self._buffered[trainer] -= num_groups
        return numbers

    def _choice(self, trainer: int, version: int, num_groups: int) -> list[int]:
        """What `choose` says as far as this trainer goes; empty while it must wait."""
        max_staleness = self.max_staleness
        open_ = {n: e for n, e in self._open.items() if e.trainer == trainer and e.taken_at is None}
        there = sorted(
            (e.version, e.arrival, n) for n, e in open_.items() if e.arrival is not None
        )[:num_groups]
        # That this step has left afterwards
        places = (version + 1) * self.share - self._taken[trainer] - num_groups
        assert 0 <= places < self.share, (trainer, version, num_groups, self._taken)
        numbers = {number for _, _, number in there}
        left = [
            entry.version + max_staleness
            for number, entry in open_.items()
            if number not in numbers
        ]
        too_many = any(
            sum(due <= by for due in left) > places + (by - version) * self.share
            for by in range(version, version + max_staleness + 1)
        )
        return [] if len(there) < num_groups or too_many else sorted(numbers)

    def trained(
        self, numbers: Sequence[int], version: int, effective_sample_size: float = 1.0
    ) -> dict[str, int]:
        """The step after `version` has trained these groups, which `choose` gave to it.

        Returns `counts`, and as `brake` whether it holds, when the last trainer has done the step;
        before nothing.
        """
        for number in numbers:
            entry = self._open.pop(number)
            assert entry.taken_at == version, (number, entry, version)
            self._trained[entry.trainer] += 1
            self._effective_sample_sizes[entry.trainer] = effective_sample_size
        is_done = min(self._trained) == (version + 1) * self.share
        return self.counts() | {"brake": int(self.is_braking)} if is_done else {}

    def seconds_since_loss(self) -> float:
        """Since a maker was last given up. Who waits for others waits anew, while it is started
        again."""
        return time.monotonic() - max(self._lost.values(), default=-math.inf)

    def holders(self) -> list[tuple[int, dict[str, list[int]]]]:
        """Of each trainer the groups in its buffer, and the numbers that makers have in flight, by
        the maker's name."""
        held: list[dict[str, list[int]]] = [{} for _ in self._live]
        for number, entry in self._open.items():
            if entry.arrival is None:
                held[entry.trainer].setdefault(entry.maker, []).append(number)
        return list(zip(self._buffered, held, strict=True))

    def counts(self) -> dict[str, int]:
        """Prompts by what became of them; asserts that the sum is the number of prompts that were
        ever given out.

        `trained`; `training`: taken by a trainer; `in_buffer`; `in_flight`: with a maker; `again`:
        their maker is lost and they wait for another; `dropped/<reason>`; and `not_started`: of
        those that the steps still need.
        """
        counts = {
            "trained": sum(self._trained),
            "training": sum(self._taken) - sum(self._trained),
            "in_buffer": sum(self._buffered),
            "in_flight": sum(entry.arrival is None for entry in self._open.values()),
            "again": len(self._again),
        }
        needed = self.num_steps * self.share * len(self._live) - sum(counts.values())
        counts |= {f"dropped/{reason}": number for reason, number in sorted(self._dropped.items())}
        assert sum(counts.values()) == self._next_number, (counts, self._next_number)
        assert sum(self._live) == len(self._open) + sum(self._trained)
        return counts | {"not_started": needed}

    def _is_with(self, maker: str, number: int, attempt: int) -> bool:
        entry = self._open.get(number)
        return entry is not None and (entry.maker, entry.attempt, entry.arrival) == (
            maker,
            attempt,
            None,
        )
