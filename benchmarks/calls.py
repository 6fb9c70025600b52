"""Latency of small calls over 2 and 8 workers, and the start of a worker group.

A ping has no arguments; a batch call carries one fp32 column of 4 KiB there and back. verl is
measured with its own worker group, in its default serialisation and in its faster one
(VERL_DATAPROTO_SERIALIZATION_METHOD=numpy).

Limit: raw Ray actors in verl_like's own Ray, one call to each of as many actors and one `ray.get`:
without a payload, and with a NumPy array of the same 4 KiB that every actor returns. The start of a
group is the time from its request to its first answer, imports of the worker's module included, in
a Ray that is up.
"""

import statistics

from benchmarks.harness import Report, Side, interleave, sized

ROUNDS, REPEATS = sized((12, 15), (1, 2))
STARTS = sized({2: 3, 8: 1}, {2: 1})  # workers -> how often a group is started


def main() -> None:
    report = Report("calls", "Latency of small calls and start of worker groups")
    ours = Side("ours", "dispatch_ours.py", "project")
    numpy_mode = Side(
        "verl numpy",
        "dispatch_verl.py",
        "peers",
        1,
        {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"},
    )
    default = Side("verl default", "dispatch_verl.py", "peers")
    sides = [ours, numpy_mode, default]
    for side in sides:
        side.call("begin", num_cpus=18, store_mib=200)
    for workers, starts in STARTS.items():
        found = interleave(sides[:2], starts, "start", warm_up=0, workers=workers)
        default.call("start", workers=workers)
        times = {name: [result["seconds"] for result in results] for name, results in found.items()}
        ratio = statistics.median(times["verl numpy"]) / statistics.median(times["ours"])
        report.row(f"start of {workers} workers, ours", "s", times["ours"])
        report.row(f"start of {workers} workers, verl", "s", times["verl numpy"], times_ours=ratio)
        report.target(f"start of {workers} workers, verl / ours", ratio, ">=", 1)
        ours.call("start_raw", workers=workers)
        small_calls(report, sides, workers)
    report.note(
        "Each contender has a Ray of its own, idle while another is measured; raw Ray runs in ours."
    )
    for side in sides:
        side.close()
    report.write()


def small_calls(report: Report, sides: list[Side], workers: int) -> None:
    """Interleaved rounds of some calls of each kind."""
    found = interleave(sides, ROUNDS, "small_calls", workers=workers, repeats=REPEATS)
    times = {
        (side, kind): [ms for result in results for ms in result[kind]]
        for side, results in found.items()
        for kind in results[0]
    }
    median = {key: statistics.median(values) for key, values in times.items()}
    for kind in ("ping", "batch"):
        raw = median["ours", f"raw {kind}"]
        report.row(f"{kind}, {workers} workers, raw Ray", "ms", times["ours", f"raw {kind}"])
        for side in sides:
            report.row(
                f"{kind}, {workers} workers, {side.name}",
                "ms",
                times[side.name, kind],
                of_raw=median[side.name, kind] / raw,
            )
        report.target(
            f"{kind}, {workers} workers, ours / raw Ray", median["ours", kind] / raw, "<=", 1.5
        )
    to_ping = median["ours", "batch"] / median["ours", "raw ping"]
    report.note(
        f"A batch call of {workers} workers takes {to_ping:.2f} times a raw ping without a payload."
    )


if __name__ == "__main__":
    main()
