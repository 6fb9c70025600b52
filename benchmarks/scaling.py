"""How the cost of dispatch grows with the batch and with the number of workers.

Batches of 4.5 MiB times 1 to 64 go to two workers, one column comes back: the time per byte must
not rise with size. A 4 KiB batch goes to 1 to 32 workers and back, beside the same with raw Ray
actors: a straight line is fitted to each, and the slopes are compared. The 32 processes share one
machine, so the slope is the processor time of one more worker.
"""

import statistics

import numpy as np

from benchmarks.harness import Report, Side, sized
from benchmarks.sides.dispatch_batch import BYTES_PER_TOKEN

LENGTH = 2048
ROWS, TIMES = sized((64, [1, 4, 16, 64]), (2, [1, 4]))
WORKERS = sized([1, 2, 4, 8, 16, 32], [1, 2, 4])
WARM_UP, ROUNDS, REPEATS = sized((2, 7, 5), (0, 1, 1))


def main() -> None:
    report = Report("scaling", "Cost of dispatch as the batch and the number of workers grow")
    ours = Side("ours", "dispatch_ours.py", "project")
    ours.call("begin", num_cpus=66)
    ours.call("start", workers=2)
    by_size(report, ours)
    ours.call("start", workers=WORKERS[-1])
    ours.call("start_raw", workers=WORKERS[-1])
    by_workers(report, ours)
    ours.close()
    report.write()


def by_size(report: Report, ours: Side) -> None:
    nanoseconds: dict[int, list[float]] = {times: [] for times in TIMES}
    for step in range(WARM_UP + ROUNDS):
        for times in TIMES:
            seconds = ours.call("dispatch", rows=ROWS * times, length=LENGTH, step=step)["seconds"]
            if step >= WARM_UP:
                nanoseconds[times].append(1e9 * seconds / (ROWS * times * LENGTH * BYTES_PER_TOKEN))
    median = {times: statistics.median(values) for times, values in nanoseconds.items()}
    for times, values in nanoseconds.items():
        report.row(
            f"batch of {times} x 4.5 MiB",
            "ns a byte",
            values,
            of_least=median[times] / min(median.values()),
        )
    growth = max(
        median[large] / median[small] for small in TIMES for large in TIMES if small <= large
    )
    report.target("time per byte, a batch / any smaller one", growth, "<=", 1.3)


def by_workers(report: Report, ours: Side) -> None:
    calls: dict[str, dict[int, list[float]]] = {"batch": {}, "raw batch": {}}
    for step in range(WARM_UP + ROUNDS):
        for workers in WORKERS:
            found = ours.call("small_calls", workers=workers, repeats=REPEATS)
            for kind, by_count in calls.items():
                if step >= WARM_UP:
                    by_count.setdefault(workers, []).extend(found[kind])
    slope = {}
    for kind, by_count in calls.items():
        median = [statistics.median(by_count[workers]) for workers in WORKERS]
        slope[kind], start = np.polyfit(WORKERS, median, 1)
        worst = max(
            abs(slope[kind] * w + start - ms) / ms
            for w, ms in zip(WORKERS, median, strict=True)
            if w >= 4
        )
        for workers in WORKERS:
            report.row(f"{kind} of 4 KiB, {workers} workers", "ms", by_count[workers])
        report.row(
            f"{kind} of 4 KiB, each further worker",
            "ms",
            [slope[kind]],
            largest_distance_from_line=worst,
        )
        if kind == "batch":
            report.target(
                "distance of a call from the straight line, 4 workers and more", worst, "<=", 0.25
            )
    report.target("slope, ours / raw Ray", slope["batch"] / slope["raw batch"], "<=", 1.5)


if __name__ == "__main__":
    main()
