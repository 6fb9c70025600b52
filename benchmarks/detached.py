"""Detached makers and trainers: how near a run comes to its slower side, and what a buffer passes
on (B8).

Part 1 is a simulation in virtual time, without sleeps: it proves the schedule, not the hardware.
The real ledger gives out the tickets and chooses what is trained, by its `take`, `deliver`,
`choose` and `trained`. Simulated are durations: 16 slots generate one response each, as long as it
has tokens; training 64 of them takes a constant time, cut into mini-batches, each of which waits
for its responses; weights arrive in no time and do not interrupt what is in flight. A slot asks for
a ticket when it is free. The 64 lengths of a version are quantiles of a log-normal law whose
longest is 4 or 8 times the mean, in another random order for each version; nobody knows a length
before its end. Staleness is asserted on every response.

That is what ledger and buffer allow. With staleness 1 or more a trainer takes each mini-batch as it
arrives. At staleness 0, and where a maker sends the prompts of a step together, it gets whole
batches: the rows `whole batches`. The row `begun again` simulates `detached.restart_below`: under
new weights, responses younger than this are begun again, once. They may then take a whole step
longer; `most_drawn_twice` is the largest share of all tokens that were drawn for nothing in a run.

Limit: the slower side never waits, 64 / max(16 / mean length, training rate). Peer: the synchronous
order, in which all 64 are generated, then trained. Every fraction is of the time between the ends
of steps 10 and 60.

Part 2 is real: a producer hands 512 samples of 0.9 MiB to a trainer in another process, which
collects batches of 64. Ours goes through the ledger, an actor, and `ExperienceBuffer` in the
trainer's process; verl's through its MessageQueue actor as its rollouter and trainer use it:
cloudpickle, one sample at a time. The samples that arrive are compared.
"""

import heapq
import statistics

import numpy as np

from benchmarks.harness import Report, Side, copy_rate, sized
from benchmarks.sides.detached_work import BATCH, NUM_SAMPLES, SAMPLE_BYTES
from benchmarks.sides.grpo_world import forced_lengths
from verl_like.trainer.config.detached import DetachedBlock
from verl_like.trainer.detached.ledger import PromptLedger, Ticket

SAMPLES, SLOTS = 64, 16  # samples of a version
STEPS, WARM_UP = sized((60, 10), (6, 2))
RATIOS = (0.5, 0.7, 1.0, 1.4, 2.0)  # seconds of generation, all slots busy, for one of training
SEEDS = sized(3, 1)
ROUNDS, WARM_UP_ROUNDS = sized((5, 2), (1, 0))
RESTART_BELOW = 2  # mean lengths
AT_ONCE = (1, 16, 64)  # samples in a call of ours; a maker sends what it has made together


def lengths(max_over_mean: float, seed: int, longest_first: bool = False) -> np.ndarray:
    """(STEPS, SAMPLES) durations with a mean of 1."""
    law = np.array(forced_lengths(SAMPLES, 100_000, max_over_mean), dtype=float)
    random = np.random.default_rng(seed)
    orders = [
        sorted(law, reverse=True) if longest_first else random.permutation(law)
        for _ in range(STEPS)
    ]
    return np.array(orders) / law.mean()


def synchronous(durations: np.ndarray, train_s: float) -> list[float]:
    """Seconds at which each step ends: a slot takes the next response when it is free, training
    follows the last."""
    ends = [0.0]
    for step in durations:
        slots = [ends[-1]] * SLOTS
        for duration in step:
            heapq.heapreplace(slots, slots[0] + duration)
        ends.append(max(slots) + train_s)
    return ends[1:]


def detached(
    durations: np.ndarray,
    train_s: float,
    max_staleness: int,
    num_parts: int,
    at_a_time: int = 1,
    restart_below: float = 0.0,
    drawn_twice: list[float] | None = None,
) -> list[float]:
    """Seconds at which each step ends; a maker takes and delivers `at_a_time` responses together.

    Under new weights it begins those again, once, that are younger than `restart_below`;
    `drawn_twice` gets the share of all tokens that were drawn for nothing.
    """
    ledger = PromptLedger(
        num_steps=STEPS, batch_size=SAMPLES, detached=DetachedBlock(), max_staleness=max_staleness
    )
    part = SAMPLES // num_parts
    version = 0
    free_slots = SLOTS
    now = 0.0
    # (when, number and attempt of the ticket that ends, or -1: a part ends)
    events: list[tuple[float, int, int]] = []
    started_at: dict[int, int] = {}
    ends_at: dict[int, float] = {}  # of what is in flight
    renewed: dict[int, float] = {}  # seconds of it that were for nothing
    ends: list[float] = []
    taken: list[int] = []
    queue: list[Ticket] = []
    finished: list[tuple[Ticket, int]] = []
    is_training = False
    while version < STEPS:
        while free_slots:
            if not queue and (at_a_time == 1 or free_slots == SLOTS):
                queue = ledger.take("maker", version, at_a_time) or []
            if not queue:
                break
            ticket = queue.pop(0)
            started_at[ticket.number] = version
            ends_at[ticket.number] = now + durations.flat[ticket.number]
            heapq.heappush(events, (ends_at[ticket.number], ticket.number, ticket.attempt))
            free_slots -= 1
        if not is_training and (numbers := ledger.choose(0, version, part)) is not None:
            assert all(0 <= version - started_at.pop(number) <= max_staleness for number in numbers)
            taken += numbers
            is_training = True
            heapq.heappush(events, (now + train_s / num_parts, -1, 0))
        now, number, attempt = heapq.heappop(events)
        if number >= 0:
            if ends_at[number] > now:  # it was begun again
                continue
            free_slots += 1
            ends_at.pop(number)
            finished.append((Ticket(number, attempt, 0), started_at[number]))
            if at_a_time == 1 or free_slots == SLOTS:
                assert len(ledger.deliver("maker", finished)) == len(finished)
                finished = []
            continue
        is_training = False
        if len(taken) == SAMPLES:
            ledger.trained(taken, version)
            version = version + 1
            taken = []
            ends.append(now)
            ages = {number: now - (end - durations.flat[number]) for number, end in ends_at.items()}
            young = {
                number: age
                for number, age in ages.items()
                if age < restart_below and number not in renewed
            }
            ledger.renew("maker", [Ticket(number, 0, 0) for number in young], version)
            renewed |= young
            for number in young:
                started_at[number], ends_at[number] = version, now + durations.flat[number]
                heapq.heappush(events, (ends_at[number], number, 0))
    if drawn_twice is not None:
        drawn_twice.append(sum(renewed.values()) / durations.sum())
    assert ledger.counts()["trained"] == STEPS * SAMPLES
    return ends


def fractions(
    max_over_mean: float,
    ratio: float,
    max_staleness: int | None,
    num_parts: int,
    at_a_time: int = 1,
    longest_first: bool = False,
    restart_below: float = 0.0,
    drawn_twice: list[float] | None = None,
) -> float:
    """Of the limit, mean of the seeds; the synchronous order where `max_staleness` is None."""
    generate_s = SAMPLES / SLOTS
    train_s = generate_s / ratio
    found = []
    for seed in range(SEEDS):
        durations = lengths(max_over_mean, seed, longest_first)
        if max_staleness is None:
            ends = synchronous(durations, train_s)
        else:
            ends = detached(
                durations, train_s, max_staleness, num_parts, at_a_time, restart_below, drawn_twice
            )
        found.append(max(generate_s, train_s) * (STEPS - WARM_UP) / (ends[-1] - ends[WARM_UP - 1]))
    return statistics.mean(found)


def schedules(report: Report) -> None:
    """The sweep over laws, staleness and ratios of generation to training."""
    wanted = {(4, 1): 0.95, (8, 1): 0.85, (8, 4): 0.95}
    for longest in (4, 8):
        sync = [fractions(longest, ratio, None, 1) for ratio in RATIOS]
        report.row(f"max/mean {longest}, synchronous order", "of the limit", sync)
        for max_staleness in (0, 1, 4):
            for num_parts, at_a_time in ((1, SAMPLES), (4, 1), (16, 1)):
                found = [
                    fractions(longest, ratio, max_staleness, num_parts, at_a_time)
                    for ratio in RATIOS
                ]
                how = "whole batches" if num_parts == 1 else f"{num_parts} mini-batches"
                what = f"max/mean {longest}, staleness {max_staleness}, {how}"
                at = {
                    f"at_{ratio:g}".replace(".", "_"): value
                    for ratio, value in zip(RATIOS, found, strict=True)
                }
                times = statistics.median(f / s for f, s in zip(found, sync, strict=True))
                report.row(what, "of the limit", found, **at, times_synchronous=times)
                if num_parts == 16 and (longest, max_staleness) in wanted:
                    report.target(
                        f"{what}, least of the ratios",
                        min(found),
                        ">=",
                        wanted[longest, max_staleness],
                    )
    drawn_twice: list[float] = []
    again = [
        fractions(8, ratio, 1, 16, restart_below=RESTART_BELOW, drawn_twice=drawn_twice)
        for ratio in RATIOS
    ]
    what = (
        f"max/mean 8, staleness 1, 16 mini-batches, younger than {RESTART_BELOW} mean lengths "
        "begun again"
    )
    report.row(what, "of the limit", again, most_drawn_twice=max(drawn_twice))
    report.target(f"{what}, least of the ratios", min(again), ">=", wanted[8, 1])
    known = [fractions(8, ratio, 1, 16, longest_first=True) for ratio in RATIOS]
    report.row("max/mean 8, staleness 1, longest first, were it known", "of the limit", known)


def buffers(report: Report) -> None:
    """Samples a second through our buffer and through verl's queue, in turn."""
    sides = [
        Side("ours", "detached_ours.py", "project"),
        Side(
            "verl numpy",
            "detached_verl.py",
            "peers",
            1,
            {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"},
        ),
        Side("verl default", "detached_verl.py", "peers"),
    ]
    rates: dict[str, list[float]] = {}
    for side in sides:
        side.call("start")
    for index in range(WARM_UP_ROUNDS + ROUNDS):
        sums = []
        for side in [*sides[index % 3 :], *sides[: index % 3]]:
            for at_once in AT_ONCE if side.name == "ours" else (1,):
                result = side.call("pass_on", seed=index, at_once=at_once)
                sums.append(result["sums"])
                if index >= WARM_UP_ROUNDS:
                    name = f"{side.name}, {at_once} in a call"
                    rates.setdefault(name, []).append(NUM_SAMPLES / result["seconds"])
        for other in sums[1:]:
            np.testing.assert_array_equal(other, sums[0])
    median = {name: statistics.median(values) for name, values in rates.items()}
    limit = copy_rate(BATCH * SAMPLE_BYTES) / SAMPLE_BYTES
    best = max(rate for name, rate in median.items() if name.startswith("verl"))
    for name, values in rates.items():
        report.row(
            f"0.9 MiB, {name}",
            "samples/s",
            values,
            of_memcpy=median[name] / limit,
            times_verl=median[name] / best,
        )
    for at_once in AT_ONCE:
        report.target(
            f"0.9 MiB, ours, {at_once} in a call / verl",
            median[f"ours, {at_once} in a call"] / best,
            ">=",
            10,
        )
    for side in sides:
        side.close()


def main() -> None:
    report = Report(
        "detached", "Detached training: schedules of simulated durations, and a real buffer"
    )
    schedules(report)
    report.note(
        "The schedules are simulated in virtual time with the real ledger; a ratio is generation "
        "to training."
    )
    buffers(report)
    report.note("The samples that arrive are the same on all sides in every round.")
    report.write()


if __name__ == "__main__":
    main()
