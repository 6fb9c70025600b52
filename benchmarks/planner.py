"""Planning: micro-batches by a token budget, and shares of equal work, against verl's and
OpenRLHF's seqlen_balancing.

Sequences of four length laws, 128 to 16,384 of them, one thread. Of every plan it is checked that
it has each row once, shares of equal size, and for micro-batches no more tokens than the budget (a
peer's violations are counted).

Limits: micro-batches, max(ceil(tokens / budget), rows longer than half the budget); shares,
greatest / mean = 1. The bins of first-fit decreasing are counted by a plain implementation here. A
peer that did not finish a law within SECONDS_LIMIT is not asked for larger plans of it: verl's
micro-batches take 10 s at 512 rows and up to 90 s. OpenRLHF's shares are a copy of verl's.
"""

import math
import statistics
from typing import Any

import numpy as np

from benchmarks.harness import Report, Side, sized
from benchmarks.sides.planner_data import BUDGET, LAWS, lengths

MICRO_BATCH_ROWS = sized((128, 512, 2048, 8192, 16384), (128,))
# By cost for verl
ALL_SHARES = ((128, 8), (512, 64), (16384, 8), (8192, 64), (2048, 512), (8192, 512), (16384, 512))
SHARES = sized(ALL_SHARES, ALL_SHARES[:1])
ROUNDS = sized(5, 1)
SECONDS_LIMIT = 3.0


class Contest:
    """Calls the sides in turn and drops a peer from a contest in which it ran out of time."""

    def __init__(self, *sides: Side) -> None:
        self.sides = sides
        self.gave_up: dict[tuple[str, ...], dict[str, int]] = {}

    def plans(
        self, contest: tuple[str, ...], function: str, **arguments: Any
    ) -> dict[str, list[dict[str, Any]]]:
        """By side, the plans of the rounds, one round of a peer that takes long; without those that
        gave up."""
        slow = self.gave_up.setdefault(contest, {})
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(ROUNDS):
            for side in self.sides:
                if side.name in slow or (
                    side.name in found and found[side.name][0]["seconds"] > SECONDS_LIMIT / 20
                ):
                    continue
                plan = side.call(function, limit=SECONDS_LIMIT, **arguments)
                if plan:
                    found.setdefault(side.name, []).append(plan)
                else:
                    slow[side.name] = arguments["rows"]
        return found


def main() -> None:
    report = Report(
        "planner", "Micro-batches by a token budget and shares of equal work, one thread"
    )
    ours = Side("ours", "planner_ours.py", "project")
    verl = Side("verl", "planner_verl.py", "peers")
    openrlhf = Side("OpenRLHF", "planner_openrlhf.py", "peers")
    contests = Contest(ours, verl, openrlhf), Contest(ours, verl)
    compare_micro_batches(report, contests[0])
    compare_shares(report, contests[1])
    for contest in contests:
        for what, names in contest.gave_up.items():
            if names:
                told = " and ".join(f"{name} {rows} rows" for name, rows in names.items())
                report.note(f"Not finished within {SECONDS_LIMIT:g} s, {', '.join(what)}: {told}.")
    for side in (ours, verl, openrlhf):
        side.close()
    report.write()


def compare_micro_batches(report: Report, contest: Contest) -> None:
    violations: dict[str, int] = {side.name: 0 for side in contest.sides}
    beyond_first_fit = 0
    slowest = 0.0
    for rows in MICRO_BATCH_ROWS:
        for law in LAWS:
            tokens_B = lengths(law, rows)
            least = max(math.ceil(tokens_B.sum() / BUDGET), int((tokens_B > BUDGET / 2).sum()))
            first_fit = first_fit_decreasing(tokens_B)
            found = contest.plans(("micro-batches", law), "micro_batches", law=law, rows=rows)
            milliseconds = {
                name: [1e3 * plan["seconds"] for plan in plans] for name, plans in found.items()
            }
            for name, plans in found.items():
                loads = checked_loads(plans[0], tokens_B)
                violations[name] += int((loads > BUDGET).sum())
                ratio = statistics.median(milliseconds[name]) / statistics.median(
                    milliseconds["ours"]
                )
                report.row(
                    f"micro-batches of {rows} rows, {law}, {name}", "ms", milliseconds[name],
                    **{"bins": len(loads), "first_fit_bins": first_fit, "least_bins": least},
                    **({} if name == "ours" else {"ratio": ratio}),
                )  # fmt: skip
                if name == "ours":
                    beyond_first_fit = max(beyond_first_fit, len(loads) - first_fit)
            if rows == 8192:
                slowest = max(slowest, statistics.median(milliseconds["ours"]))
    report.target("micro-batches of 8,192 rows, the slowest law, ms", slowest, "<=", 20)
    report.target("micro-batches beyond those of first-fit decreasing", beyond_first_fit, "<=", 0)
    report.target("micro-batches above the budget", violations["ours"], "<=", 0)
    report.note(f"Micro-batches above the budget: {violations}.")


def compare_shares(report: Report, contest: Contest) -> None:
    worst = -100.0
    for rows, parts in SHARES:
        milliseconds: dict[str, list[float]] = {}
        unevenness: dict[str, list[float]] = {}
        for law in LAWS:
            tokens_B = lengths(law, rows)
            found = contest.plans(
                ("shares of equal size", law), "shares", law=law, rows=rows, parts=parts
            )
            for name, plans in found.items():
                assert set(plans[0]["sizes"]) == {rows // parts}
                loads = checked_loads(plans[0], tokens_B)
                milliseconds.setdefault(name, []).append(
                    1e3 * statistics.median(p["seconds"] for p in plans)
                )
                unevenness.setdefault(name, []).append(
                    float(100 * (loads.max() / loads.mean() - 1))
                )
                if name == "verl":
                    worst = max(worst, unevenness["ours"][-1] - unevenness["verl"][-1])
        for name, values in milliseconds.items():
            what = f"{parts} shares of {rows} rows, equal size, {name}, {len(values)} laws"
            ratio = statistics.median(values) / statistics.median(milliseconds["ours"])
            report.row(what, "ms", values, **({} if name == "ours" else {"ratio": ratio}))
            report.row(what, "% above the mean", unevenness[name])
    report.target(
        "shares of equal size, max/mean above verl's, the worst case", worst / 100, "<=", 0.0005
    )


def checked_loads(plan: dict[str, Any], tokens_B: np.ndarray) -> np.ndarray:
    """Tokens of each part of a plan, which must have every row once and no part without rows."""
    assert (
        np.array_equal(np.sort(plan["rows"]), np.arange(len(tokens_B))) and plan["sizes"].min() > 0
    )
    return np.add.reduceat(tokens_B[plan["rows"]], np.cumsum(plan["sizes"]) - plan["sizes"])


def first_fit_decreasing(tokens_B: np.ndarray) -> int:
    """Bins by the rule "the longest first, each into the first bin that has room"."""
    room = np.full(len(tokens_B), BUDGET)
    for tokens in np.sort(tokens_B)[::-1]:
        room[np.argmax(room >= tokens)] -= tokens
    return int((room < BUDGET).sum())


if __name__ == "__main__":
    main()
