"""This version of the project beside another one, in turn on the same work: nothing got slower.

`python -m benchmarks.versions TREE`, where TREE is a checkout of the other version with an
environment, for example

    git worktree add ../before e795b27 && ln -s "$PWD/.venv" ../before/.venv

The other version runs twice. How far its two runs are apart is what this machine cannot tell from a
difference.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness, toy_world
from benchmarks.harness import ROOT, Report, Side, interleave, other_version, sized
from benchmarks.resume import seconds_to_first_step

BOUND = 1.05
"""The longest time over the other version's, where its two runs are not further apart."""
START_BOUND_S = 1.0
"""How much later the first step may end."""


def main() -> None:
    tree, commit = other_version()
    report = Report(
        "versions", f"This version beside {commit}, in turn, one thread each unless said"
    )
    trees = {"this": ROOT, commit: tree, f"{commit} again": tree}

    def sides(script: str, threads: int = 1) -> list[Side]:
        started = []
        for name, root in trees.items():
            harness.ROOT = root  # whose packages and whose side of the benchmark the process runs
            started.append(Side(name, script, "project", threads))
        harness.ROOT = ROOT
        return started

    def compare(
        what: str,
        of_trees: list[Side],
        rounds: int,
        function: str,
        key: str = "seconds",
        **work: Any,
    ) -> None:
        results = interleave(of_trees, rounds, function, **work)
        show(what, {name: [result[key] for result in of_tree] for name, of_tree in results.items()})

    def show(what: str, seconds: dict[str, list[float]]) -> None:
        for name, values in seconds.items():
            report.row(f"{what}, {name}", "ms", [1e3 * value for value in values])
        this, other, again = (statistics.median(values) for values in seconds.values())
        floor = max(other, again) / min(other, again)
        report.target(
            f"{what}: this / {commit}",
            this / statistics.mean([other, again]),
            "<=",
            max(BOUND, floor),
        )

    first_step(report, trees)
    for measure in (maths, head, planner, dispatch, overlap, rollout):
        measure(sides, compare, show)
    report.write()


def first_step(report: Report, trees: dict[str, Path]) -> None:
    """From the command to the end of the first step of the toy job, started in turn."""
    world = toy_world.make()
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(sized(5, 1)):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds[name].append(seconds_to_first_step(Path(folder), 0, world, tree))
    for name, values in seconds.items():
        report.row(f"first step of the toy job, {name}", "s", values)
    this, other, again = (statistics.median(values) for values in seconds.values())
    later = this - statistics.mean([other, again])
    report.target("first step of the toy job: seconds later", later, "<=", START_BOUND_S)


def maths(sides: Callable, compare: Callable, show: Callable) -> None:
    of_trees = sides("advantages_ours.py")
    for side in of_trees:
        side.call("load", rows=256, length=8192, holes=False)
    for function, key in (("gae", "seconds"), ("grpo", "seconds"), ("loss", "both")):
        compare(f"{function}, 256 x 8192 tokens", of_trees, 9, function, key)
    close(of_trees)


def head(sides: Callable, compare: Callable, show: Callable) -> None:
    of_trees = sides("head_ours.py", threads=2)
    for side in of_trees:
        side.call("prepare", head="ours", shape=[1024, 65536, 256], device="cpu")
    for backward, what in ((False, "forward"), (True, "forward and backward")):
        compare(f"head {what}, 2 threads", of_trees, 7, "run", backward=backward)
    close(of_trees)


def planner(sides: Callable, compare: Callable, show: Callable) -> None:
    of_trees = sides("planner_ours.py")
    for law in ("log-normal", "above half"):
        compare(
            f"micro-batches of 8192 rows, {law}",
            of_trees,
            9,
            "micro_batches",
            law=law,
            rows=8192,
            limit=60.0,
        )
    compare(
        "64 shares of 8192 rows",
        of_trees,
        40,
        "shares",
        law="log-normal",
        rows=8192,
        parts=64,
        limit=60.0,
    )
    close(of_trees)


def dispatch(sides: Callable, compare: Callable, show: Callable) -> None:
    of_trees = sides("dispatch_ours.py")
    for side in of_trees:
        side.call("begin", num_cpus=6, store_mib=1500)
        side.call("start", workers=2)
        side.call("start_raw", workers=2)
    found = interleave(of_trees, 40, "small_calls", workers=2, repeats=15)
    for kind in ("ping", "batch"):
        of_kind = {
            name: [ms / 1e3 for result in results for ms in result[kind]]
            for name, results in found.items()
        }
        show(f"{kind}, 2 workers", of_kind)
    for rows in (64, 1024):
        results: dict[str, list[float]] = {side.name: [] for side in of_trees}
        for step in range(16):
            first = step % len(of_trees)
            for side in [*of_trees[first:], *of_trees[:first]]:
                seconds = side.call("dispatch", rows=rows, length=2048, step=step)["seconds"]
                if step >= 2:
                    results[side.name].append(seconds)
        show(f"dispatch of {rows} x 2048 tokens", results)
    close(of_trees)


def overlap(sides: Callable, compare: Callable, show: Callable) -> None:
    of_trees = sides("overlap_ours.py")
    for side in of_trees:
        side.call("start")
    for what, rows, length, sleep_s in (("simulated", 256, 2048, 0.3), ("real", 64, 256, 0.0)):
        work = {"rows": rows, "length": length, "seed": 3, "sleep_s": sleep_s}
        compare(f"actor and critic update at once, {what} training", of_trees, 9, "update", **work)
    close(of_trees)


def rollout(sides: Callable, compare: Callable, show: Callable) -> None:
    of_trees = sides("rollout_ours.py")
    for side in of_trees:
        side.call("start")
    compare("generation with long-tailed lengths", of_trees, 5, "generate", warm_up=1, seed=1)
    close(of_trees)


def close(of_trees: list[Side]) -> None:
    for side in of_trees:
        side.close()


if __name__ == "__main__":
    main()
