"""Which replica takes which request: what the two values of `rollout.routing` make of uneven
lengths.

A simulation in virtual time, without sleeps: it proves the schedule, not the hardware. The real
RequestQueue says which replica takes which request, and when. Simulated are durations: 8 replicas
of 64 slots, in each of which one request at a time is drawn, as long as it has tokens. A replica
that was given more requests than it has slots begins the next one as one ends. A batch has 128
prompts with 8 responses each. Nobody knows a length before its end.

Lengths are drawn from an exponential law. Then the greatest is set to 8 times the mean of all, with
it included, and so are those that would be above it. `equal parts` is the routing `fixed`, where a
batch waits for the one before; `one queue` is `least_loaded`, where the requests of the next
batches wait behind those of the first. Both sides draw the same requests: it is asserted that each
is drawn, and that the lengths add up to the same.

Limit: the longest request, or all lengths over all slots, whichever is more. The rows `told late`
have a driver that hears of each end only after this share of a mean length; a run gathers what has
ended for 0.05 s.
"""

import heapq
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Report, sized
from verl_like.workers.rollout.request import GenerationRequest, Sampling
from verl_like.workers.rollout.routing import RequestQueue

REPLICAS = 8
SLOTS = 64
PROMPTS, SAMPLES = 128, 8  # of a batch
BATCHES = 4
MAX_OVER_MEAN = 8
SEEDS = sized(20, 2)
TOLD_LATE = (0.02, 0.1)  # mean lengths
SAMPLING = Sampling(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=1, stop_token_ids=())


def exponential_lengths(number: int, seed: Sequence[int]) -> np.ndarray:
    """(number,) durations, of which the greatest is MAX_OVER_MEAN times the mean."""
    lengths = np.random.default_rng(seed).exponential(size=number)
    ascending = np.sort(lengths)
    num_set = 1
    while True:
        rest = ascending[: number - num_set]
        greatest = MAX_OVER_MEAN * rest.sum() / (number - MAX_OVER_MEAN * num_set)
        if rest[-1] <= greatest:
            return np.where(lengths > rest[-1], greatest, lengths)
        num_set += 1


def simulate(
    routing: str,
    batches: Sequence[Sequence[float]],
    n: int,
    num_replicas: int,
    num_slots: int,
    told_late: float = 0.0,
) -> tuple[list[float], float]:
    """When each batch ends, and the sum of all lengths that were drawn.

    All batches, n responses to a prompt, are there from the start. The queue hears of an end
    `told_late` after it.
    """
    queue = RequestQueue(routing, num_replicas, num_slots)
    # Of the requests that have not begun, the batch and the length
    left: dict[str, tuple[int, float]] = {}
    for number, lengths in enumerate(batches):
        names = [f"{number}.{i}" for i in range(len(lengths))]
        left |= {name: (number, float(length)) for name, length in zip(names, lengths, strict=True)}
        prompts = [(name, f"{number}.{i // n}", i % n) for i, name in enumerate(names)]
        queue.add(
            [GenerationRequest(name, (), 0, SAMPLING, uid, index) for name, uid, index in prompts],
            n,
        )
    given: list[deque[str]] = [deque() for _ in range(num_replicas)]
    num_free = [num_slots] * num_replicas
    # (when, whether the queue is told, of which request and replica)
    events: list[tuple[float, bool, str, int]] = []
    ends = [0.0] * len(batches)
    now = drawn = 0.0
    while len(queue):
        for replica, requests in enumerate(queue.take()):
            given[replica].extend(request.name for request in requests)
            while given[replica] and num_free[replica]:
                name = given[replica].popleft()
                number, length = left.pop(name)
                num_free[replica] -= 1
                drawn += length
                ends[number] = max(ends[number], now + length)
                heapq.heappush(events, (now + length, False, name, replica))
        now, is_told, name, replica = heapq.heappop(events)
        if is_told:
            queue.ended(name)
        else:
            num_free[replica] += 1
            heapq.heappush(events, (now + told_late, True, name, replica))
    assert not left, "a request was not drawn"
    return ends, drawn


def times(routing: str, batches: Sequence[np.ndarray], told_late: float = 0.0) -> float:
    """How long the batches take together, in mean lengths."""
    ends, drawn = simulate(routing, batches, SAMPLES, REPLICAS, SLOTS, told_late)
    total = sum(lengths.sum() for lengths in batches)
    assert np.isclose(drawn, total), (drawn, total)
    return max(ends) / (total / (len(batches) * PROMPTS * SAMPLES))


def limit(batches: Sequence[np.ndarray]) -> float:
    """The least time that any schedule takes, in mean lengths."""
    lengths = np.concatenate(batches)
    return max(lengths.max(), lengths.sum() / (REPLICAS * SLOTS)) / lengths.mean()


def main() -> None:
    report = Report(
        "routing",
        "Which replica takes which request: lengths simulated in virtual time, with the real queue",
    )
    runs = [
        [exponential_lengths(PROMPTS * SAMPLES, (seed, batch)) for batch in range(BATCHES)]
        for seed in range(SEEDS)
    ]
    for what, num_batches in (("one batch", 1), (f"{BATCHES} batches", BATCHES)):
        batches = [run[:num_batches] for run in runs]
        limits = [limit(each) for each in batches]
        in_parts = [times("fixed", each) for each in batches]
        shares = [least / time for least, time in zip(limits, in_parts, strict=True)]
        report.row(
            f"{what}, equal parts", "of the limit", shares, mean_lengths=statistics.median(in_parts)
        )
        for told_late in (0.0, *TOLD_LATE):
            in_queue = [times("least_loaded", each, told_late) for each in batches]
            shares = [least / time for least, time in zip(limits, in_queue, strict=True)]
            gain = statistics.median(
                parts / one for parts, one in zip(in_parts, in_queue, strict=True)
            )
            ratios = {"mean_lengths": statistics.median(in_queue), "times_equal_parts": gain}
            late = f", told late by {told_late:g}" if told_late else ""
            report.row(f"{what}, one queue{late}", "of the limit", shares, **ratios)
            if told_late == 0.0 and num_batches == 1:
                report.target("one batch, one queue / equal parts", gain, ">=", 0.97)
                report.target(
                    "one batch, one queue, of the limit", statistics.median(shares), ">=", 0.9
                )
            elif told_late == 0.0:
                report.target(
                    f"{what}, one queue / equal parts, each after the one before", gain, ">=", 1.25
                )
    report.note(
        f"{REPLICAS} replicas of {SLOTS} slots, batches of {PROMPTS * SAMPLES} requests whose "
        f"longest is {MAX_OVER_MEAN} times the mean, {SEEDS} seeds; times are in mean lengths. "
        "Both sides draw the same requests."
    )
    report.note("Equal parts is rollout.routing=fixed, one queue is least_loaded.")
    report.write()


if __name__ == "__main__":
    main()
