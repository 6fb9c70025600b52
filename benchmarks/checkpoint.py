"""How long a step is held up by a checkpoint of 512 MiB: the parameters of an actor and Adam's
moments.

In turn, each round with another state: ours; `async_save` of torch with a stager that keeps its
buffers; `save` of torch. Held up is the step from the beginning of the save until training may
change the state, which it then does at once. What was written is read again and has the bits that
the state had before.

The limit is one memcpy of the bytes with one thread, between buffers that are in memory, measured
in the same run. The buffers of ours are allocated by the first save, which has a row of its own.

While a copy is written in a thread, the process has to be able to train: the row `stands still` is
the longest time in which it ran no Python meanwhile. The last row is what the driver does once all
is written.
"""

import statistics

from benchmarks.harness import Report, Side, copy_rate, sized

WARM_UP, ROUNDS = sized((1, 5), (0, 1))
WAYS = ("ours", "async_save", "save")
SHAPE_OF_512_MIB = sized({"hidden": 384, "layers": 24}, {"hidden": 64, "layers": 2})


def measure(report: Report, side: Side, shape: dict[str, int]) -> None:
    """Interleaved rounds."""
    size = side.call("start", **shape)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    memcpy = []
    for index in range(WARM_UP + ROUNDS):
        start = index % len(WAYS)
        for way in [*WAYS[start:], *WAYS[:start]]:
            found[way].append(side.call("save", way=way))
        memcpy.append(size["num_bytes"] / copy_rate(size["num_bytes"]))
    limit = statistics.median(memcpy[WARM_UP:])
    report.row("memcpy", "ms", [1e3 * seconds for seconds in memcpy[WARM_UP:]])
    report.row("ours, the first save: held up", "ms", [1e3 * found["ours"][0]["held_up"]])
    for way, name in (("ours", "ours"), ("async_save", "torch async_save"), ("save", "torch save")):
        values = {what: [result[what] for result in found[way][WARM_UP:]] for what in found[way][0]}
        held_up = [1e3 * seconds for seconds in values["held_up"]]
        report.row(
            f"{name}: held up",
            "ms",
            held_up,
            times_memcpy=statistics.median(held_up) / (1e3 * limit),
        )
        if way != "save":
            report.row(
                f"{name}: stands still while it writes",
                "ms",
                [1e3 * value for value in values["standstill"]],
            )
        report.row(f"{name}: written", "ms", [1e3 * seconds for seconds in values["written"]])
    report.row(
        "ours: commit on the driver",
        "ms",
        [1e3 * result["commit"] for result in found["ours"][WARM_UP:]],
    )
    held_up = statistics.median(result["held_up"] for result in found["ours"][WARM_UP:])
    report.target("a step is held up / memcpy", held_up / limit, "<=", 1.5)
    report.note(
        f"{size['num_bytes'] / 2**20:.0f} MiB in {size['num_tensors']} tensors; each save was read "
        "again."
    )


def main() -> None:
    report = Report("checkpoint", "How long a step is held up by a checkpoint of 512 MiB")
    side = Side("worker", "checkpoint_worker.py", "project")
    measure(report, side, SHAPE_OF_512_MIB)
    side.call("stop")
    side.close()
    report.write()


if __name__ == "__main__":
    main()
