"""Advantage and loss maths on a batch of 1024 x 8192 tokens: GAE, GRPO and the clipped policy loss,
against verl's.

Both sides compute on the same float32 columns with one thread, in turn. Outputs are compared on the
response tokens, for a mask of plain prefixes and for one with holes (a tool's output inside the
response). verl's values at masked positions are not: it leaves there what the recursion carries,
verl_like writes zeros.

Limit: what GAE must move, three columns read and two written, at the speed of one thread's copy of
one column.
"""

import statistics

import numpy as np

from benchmarks.harness import Report, Side, copy_rate, interleave, sized
from benchmarks.sides.advantages_work import batch

ROWS, LENGTH, ROUNDS = sized((1024, 8192, 7), (16, 256, 1))


def main() -> None:
    report = Report("advantages", f"Advantage and loss maths, {ROWS} x {LENGTH} tokens, one thread")
    ours = Side("ours", "advantages_ours.py", "project")
    verl = Side("verl", "advantages_verl.py", "peers")
    column_bytes = ROWS * LENGTH * 4
    worst = 0.0
    for holes in (False, True):
        where = "with holes" if holes else "prefixes"
        for side in (ours, verl):
            side.call("load", rows=ROWS, length=LENGTH, holes=holes)
        largest = compare(ours, verl, batch(ROWS, LENGTH, holes)["mask"].astype(bool))
        report.note(
            f"Largest difference, {where}: "
            + ", ".join(f"{name} {d:.1e}" for name, d in largest.items())
        )
        worst = max(worst, *largest.values())
        assert worst <= 1e-5, largest
        limit = 5 * column_bytes / copy_rate(column_bytes)
        found = interleave([ours, verl], ROUNDS, "gae", warm_up=1)
        ratio = show(report, f"GAE, {where}", found, "seconds", limit)
        report.target(f"GAE, {where}, verl / ours", ratio, ">=", 4)
        report.target(
            f"GAE, {where}, ms",
            1e3 * statistics.median(r["seconds"] for r in found["ours"]),
            "<=",
            250,
        )
    found = interleave([ours, verl], ROUNDS, "grpo", warm_up=1)
    report.target("GRPO, verl / ours", show(report, "GRPO", found, "seconds"), ">=", 1)
    found = interleave([ours, verl], ROUNDS, "loss", warm_up=1)
    report.target(
        "policy loss, verl / ours", show(report, "policy loss, forward", found, "forward"), ">=", 1
    )
    show(report, "policy loss, forward and backward", found, "both")
    report.target("largest difference of any output", worst, "<=", 1e-5)
    for side in (ours, verl):
        side.close()
    report.write()


def compare(ours: Side, verl: Side, mask: np.ndarray) -> dict[str, float]:
    """The largest differences of the two sides' outputs on the response tokens."""
    one = ours.call("outputs")
    other = verl.call("outputs")
    assert one.keys() == other.keys()
    return {
        name: float(np.abs(one[name] - other[name])[mask if one[name].ndim else ...].max())
        for name in sorted(one)
    }


def show(report: Report, what: str, found: dict, key: str, limit: float | None = None) -> float:
    """Reports both sides' times; the ratio of their medians."""
    times = {side: [1e3 * result[key] for result in results] for side, results in found.items()}
    median = {side: statistics.median(values) for side, values in times.items()}
    of_limit = {"of_limit": 1e3 * limit / median["ours"]} if limit else {}
    report.row(f"{what}, ours", "ms", times["ours"], **of_limit)
    report.row(f"{what}, verl", "ms", times["verl"], ratio=median["verl"] / median["ours"])
    return median["verl"] / median["ours"]


if __name__ == "__main__":
    main()
