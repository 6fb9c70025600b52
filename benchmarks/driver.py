"""The driver's part of a PPO step, this version beside another one: bytes of the batch, CPU
seconds, memory.

`python -m benchmarks.driver TREE`, where TREE is a checkout of the other version (see
`benchmarks.versions`).

8,192 samples of at most 3,072 tokens, 600 in the mean: a share of the lengths is cut at the
longest, as in reasoning. Workers of two ranks are scripted: they return columns of the right shapes
at once. A round goes from the result of `generate_sequences` to the replies of actor and critic,
without rewards, and without an estimator or with one that does nothing, for which this version pads
the batch and takes the padding away again.
"""

import statistics

from benchmarks import harness
from benchmarks.harness import ROOT, Report, Side, interleave, other_version, sized

NUM_SAMPLES, LONGEST_PROMPT, LONGEST_RESPONSE = sized((8192, 1024, 2048), (64, 32, 64))
ROUNDS = sized(5, 1)


def main() -> None:
    tree, commit = other_version()
    report = Report(
        "driver",
        f"The driver's part of a step of {NUM_SAMPLES:,} samples, this version beside {commit}",
    )
    script = str(ROOT / "benchmarks" / "sides" / "driver_ours.py")
    both = []
    for name, root in (("this", ROOT), (commit, tree)):
        harness.ROOT = root  # whose package the process imports
        both.append(Side(name, script, "project"))
    harness.ROOT = ROOT
    measure(report, both, commit)
    for side in both:
        side.close()
    report.write()


def measure(report: Report, both: list[Side], commit: str) -> None:
    for side in both:
        side.call(
            "start", num_samples=NUM_SAMPLES, prompt=LONGEST_PROMPT, response=LONGEST_RESPONSE
        )
    medians: dict[tuple[str, str], float] = {}
    for with_estimator in (False, True):
        what = "with an estimator that does nothing" if with_estimator else "without estimator"
        rounds = interleave(both, ROUNDS, "step", warm_up=1, with_estimator=with_estimator)
        assert len({result["num_tokens"] for results in rounds.values() for result in results}) == 1
        assert len({result["sum"] for results in rounds.values() for result in results}) == 1
        for name, results in rounds.items():
            report.row(
                f"{what}, {name}: CPU of the driver", "s", [result["cpu"] for result in results]
            )
            report.row(
                f"{what}, {name}: until the replies", "s", [result["seconds"] for result in results]
            )
            report.row(
                f"{what}, {name}: peak memory of the driver", "GiB", [results[-1]["peak"] / 2**30]
            )
            medians[what, name] = statistics.median(result["cpu"] for result in results)
        report.target(
            f"{what}: CPU of {commit} / this",
            medians[what, commit] / medians[what, "this"],
            ">=",
            2,
        )
    num_bytes = {side.name: side.call("num_bytes") for side in both}
    for name, found in num_bytes.items():
        report.row(f"bytes of all columns, {name}", "MiB", [found["columns"] / 2**20])
        report.row(
            f"bytes through the object store a round, {name}", "MiB", [found["store"] / 2**20]
        )
    ratio = num_bytes[commit]["columns"] / num_bytes["this"]["columns"]
    report.target(f"bytes of all columns, {commit} / this", ratio, ">=", 3)


if __name__ == "__main__":
    main()
