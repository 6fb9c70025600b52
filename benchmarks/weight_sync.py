"""512 MiB of bfloat16 parameters from a trainer's process to an engine's on the same node (B9).

In turn, each round with new values: gloo and shared memory as they are configured by
`rollout.weight_transport`; a gloo broadcast of each tensor, as verl and OpenRLHF do without
buckets; and a gloo broadcast of one buffer with all bytes, the only one that is not cut into
parameters. A time begins with the trainer's parameters and ends when the engine has all parameters
by name and has read a value of every page. So ours contains the copy into buckets, the meeting, and
the memory that is mapped. The broadcasts end in memory that the engine has already, and nobody
tells it names or shapes; both is in the peer's favour. The sums of each parameter's bits are
compared.

Limits: shared memory cannot be faster than one memcpy of the bytes, and gloo not faster than that
and the broadcast of one buffer, one after the other: 1 / (1 / broadcast + 1 / memcpy). Both are
measured in the same run, memcpy with one thread between buffers that are in memory.

Left out of these times, since neither peer does it, are the fingerprints, which the trainer takes
of its parameters and the engine of what has arrived. The rows `checked` have both.
"""

import statistics

import numpy as np

from benchmarks.harness import Report, Side, copy_rate, sized
from benchmarks.sides.weight_sync_processes import NUM_BYTES

WARM_UP, ROUNDS = sized((3, 9), (0, 1))  # two updates write into new memory
WAYS = ("one broadcast", "broadcast per tensor", "gloo", "shared_memory")


def measure(report: Report, side: Side, num_tensors: int) -> None:
    """Interleaved rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in (*WAYS, "memcpy")}
    for index in range(WARM_UP + ROUNDS):
        start = index % len(WAYS)
        ways = [*WAYS[start:], *WAYS[:start]]
        found = {
            way: side.call("sync", way=way, num_tensors=num_tensors, value=index) for way in ways
        }
        for result in found.values():
            np.testing.assert_array_equal(result["sums"], found["gloo"]["sums"])
        if index >= WARM_UP:
            for way, result in found.items():
                seconds[way].append(result["seconds"])
            seconds["memcpy"].append(NUM_BYTES / copy_rate(NUM_BYTES))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    limits = {"gloo": median["one broadcast"] + median["memcpy"], "shared_memory": median["memcpy"]}
    for name, times in seconds.items():
        ratios = {"of_limit": limits[name] / median[name]} if name in limits else {}
        report.row(
            f"{num_tensors} tensors, {name.replace('_', ' ')}",
            "ms",
            [1e3 * time for time in times],
            GiB_per_s=NUM_BYTES / 2**30 / median[name],
            times_per_tensor=median["broadcast per tensor"] / median[name],
            **ratios,
        )
    if num_tensors == 3000:
        report.target(
            "3000 tensors, gloo / (1 / (1 / broadcast + 1 / memcpy))",
            limits["gloo"] / median["gloo"],
            ">=",
            0.9,
        )
    report.target(
        f"{num_tensors} tensors, shared memory / memcpy",
        median["memcpy"] / median["shared_memory"],
        ">=",
        0.6,
    )


def main() -> None:
    report = Report(
        "weight_sync", "512 MiB of weights from a trainer's process to an engine's on the same node"
    )
    side = Side("two processes", "weight_sync_processes.py", "project")
    side.call("start")
    for num_tensors in (16, 300, 3000):
        measure(report, side, num_tensors)
    for way in ("gloo", "shared_memory"):
        found = [
            side.call("sync", way=way, num_tensors=300, value=index, with_checks=True)
            for index in range(3)
        ]
        checked = [result["seconds"] for result in found]
        report.row(
            f"300 tensors, {way.replace('_', ' ')}, checked", "ms", [1e3 * time for time in checked]
        )
    side.close()
    report.note("The parameters that arrive have the same bits on all ways in every round.")
    report.write()


if __name__ == "__main__":
    main()
