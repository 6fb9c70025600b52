"""A batch of 7 RL columns (5 int64, 2 fp32; 36 bytes a token) from the driver to two workers, and
one fp32 column back.

Every round dispatches a batch in new memory; all 7 columns travel, a worker looks at one and
returns it, and each side checks what comes back. verl serialises in its default way and, as another
contender, with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy. Each contender is a driver with a Ray of
its own; the others' idle meanwhile.

Limit: the time that one thread's memcpy takes for the bytes of the batch, between buffers that are
in memory already. The ragged variant has log-normal lengths; its measure is the bytes that pass
through the object store, over the bytes of the tokens (7 columns there, 1 back).
"""

import statistics

from benchmarks.harness import Report, Side, copy_rate, sized
from benchmarks.sides.dispatch_batch import BYTES_PER_TOKEN, REPLY_BYTES_PER_TOKEN, ragged_lengths

# 18, 72 and 288 MiB
SHAPES = sized([(256, 2048), (256, 8192), (1024, 8192)], [(16, 64), (32, 128)])
WARM_UP, ROUNDS, CALLS = sized((2, 7, 20), (0, 1, 2))
RAGGED = sized((256, 8192), (16, 128))


def main() -> None:
    report = Report("dispatch", "Dispatch of 7 columns to 2 workers and one column back")
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
        side.call("begin", num_cpus=4)
        side.call("start", workers=2)
    for rows, length in SHAPES:
        measure(report, sides, rows, length)
    growth(report, sides)
    ragged(report, sides)
    report.note("Each contender has a Ray of its own, idle while another is measured.")
    for side in sides:
        side.close()
    report.write()


def measure(report: Report, sides: list[Side], rows: int, length: int) -> None:
    """Interleaved rounds, each with new values."""
    num_bytes = int(rows * length * BYTES_PER_TOKEN)
    limit = num_bytes / copy_rate(num_bytes)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for step in range(WARM_UP + ROUNDS):
        found = {
            side.name: side.call("dispatch", rows=rows, length=length, step=step) for side in sides
        }
        assert len({result["sum"] for result in found.values()}) == 1, found
        for name, result in found.items():
            if step >= WARM_UP:
                seconds[name].append(result["seconds"])
    mib = num_bytes / 2**20
    median = {name: statistics.median(times) for name, times in seconds.items()}
    report.row(f"{mib:.0f} MiB, memcpy", "ms", [1e3 * limit], GiB_per_s=num_bytes / limit / 2**30)
    for name, times in seconds.items():
        report.row(
            f"{mib:.0f} MiB, {name}",
            "ms",
            [1e3 * time for time in times],
            GiB_per_s=num_bytes / median[name] / 2**30,
            of_memcpy=limit / median[name],
            times_ours=median[name] / median["ours"],
        )
    if (rows, length) == SHAPES[0]:
        report.target(
            f"{mib:.0f} MiB, verl numpy / ours", median["verl numpy"] / median["ours"], ">=", 1
        )
    if (rows, length) == SHAPES[-1]:
        report.target(
            f"{mib:.0f} MiB, verl default / ours", median["verl default"] / median["ours"], ">=", 20
        )
        report.target(
            f"{mib:.0f} MiB, verl numpy / ours", median["verl numpy"] / median["ours"], ">=", 3
        )
        report.target(f"{mib:.0f} MiB, fraction of memcpy", limit / median["ours"], ">=", 0.35)


def growth(report: Report, sides: list[Side]) -> None:
    """What the driver's own memory, the object store's not counted, grows by in further calls."""
    rows, length = SHAPES[0]
    for side in sides:
        sizes = []
        for step in range(WARM_UP + CALLS + 1):
            if step >= WARM_UP:
                sizes.append(side.call("resident")["bytes"])
            side.call("dispatch", rows=rows, length=length, step=step)
        grown = [(sizes[-1] - sizes[0]) / 2**20]
        report.row(
            f"driver's memory after {CALLS} more calls of 18 MiB, {side.name}", "MiB more", grown
        )
        if side.name == "ours":
            report.target("growth in batches of 18 MiB", grown[0] / 18, "<=", 0.5)


def ragged(report: Report, sides: list[Side]) -> None:
    """Bytes moved for log-normal lengths."""
    rows, longest = RAGGED
    tokens = int(ragged_lengths(rows, longest).sum())
    needed = tokens * (BYTES_PER_TOKEN + REPLY_BYTES_PER_TOKEN)
    report.note(
        f"Ragged batch: {rows} rows of up to {longest} tokens, {rows * longest / tokens:.2f} times "
        "padded."
    )
    for side in sides:
        found = [side.call("dispatch_ragged", rows=rows, longest=longest) for _ in range(3)]
        moved = [result["bytes"] / needed for result in found]
        report.row(f"ragged, {side.name}", "bytes moved / bytes of tokens", moved)
        report.row(f"ragged, {side.name}", "ms", [1e3 * result["seconds"] for result in found])
        if side.name == "ours":
            report.target(
                "ragged, bytes moved / bytes of tokens", statistics.median(moved), "<=", 1.02
            )


if __name__ == "__main__":
    main()
