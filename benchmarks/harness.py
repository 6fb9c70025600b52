"""Runs contenders side by side on the same work, compares what they return, and reports ratios,
limits and targets.

Two variables of the environment are for the tests, which run every benchmark in seconds. With
`BENCHMARK_SIZE=small` the numbers are of no worth and are written to build/benchmarks. With
`BENCHMARK_SIDES=ours` the peers are not started: each answers what our side answered last to the
same function.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from benchmarks.serve import unpacked
from scripts.commit import commit

ROOT = Path(__file__).parent.parent
IS_SMALL = os.environ.get("BENCHMARK_SIZE") == "small"
IS_OURS_ALONE = os.environ.get("BENCHMARK_SIDES") == "ours"
RESULTS = ROOT / "build" / "benchmarks" if IS_SMALL else ROOT / "benchmarks" / "results"
LINES_OF_LOG = 40
"""Lines at the end of a side's log that are shown when it fails."""
T = TypeVar("T")
PYTHON = {
    "project": sys.executable,
    "peers": str(ROOT / "benchmarks" / ".peers" / "bin" / "python"),
    "verifiers": str(ROOT / "build" / "agents" / "verifiers" / "bin" / "python"),
}


OUR_ANSWERS: dict[str, dict[str, Any]] = {}
"""The last answer to each function, for `BENCHMARK_SIDES=ours`."""


def other_version() -> tuple[Path, str]:
    """The checkout that the command line names, to be compared with this one, and its commit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    tree = parser.parse_args().tree.resolve()
    commit_there = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=tree, text=True
    )
    return tree, commit_there.strip()


def sized(whole: T, small: T) -> T:
    """A size of the work: `small` where the tests run it."""
    return small if IS_SMALL else whole


class Side:
    """One contender: a process of its own, in the project's environment or in one of the peers'.

    Args:
        name: as it is printed.
        script: file name in benchmarks/sides, or a path; it calls `serve`.
        environment: whose packages the process sees.
        threads: threads of its numerical libraries.
        variables: further environment variables.
    """

    def __init__(
        self,
        name: str,
        script: str,
        environment: Literal["project", "peers", "verifiers"],
        threads: int = 1,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.is_started = environment == "project" or not IS_OURS_ALONE
        if not self.is_started:
            return
        if not Path(PYTHON[environment]).exists():
            raise SystemExit(
                f"{PYTHON[environment]} does not exist yet: bash benchmarks/setup_peers.sh makes "
                "the peers' environments."
            )
        self.log = (
            ROOT / "benchmarks" / f".{Path(script).name}.{name.replace(' ', '_')}.log"
        ).open("w")
        self.process = subprocess.Popen(
            [PYTHON[environment], str(ROOT / "benchmarks" / "sides" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
                "RAY_DEDUP_LOGS": "0",
            }
            # Ray's workers would otherwise wait for every other process of the machine, and the
            # others' would not.
            | {"RAY_worker_niceness": "0"}
            | (variables or {}),
        )

    def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        """The result of a function of the side's script.

        Raises RuntimeError if the function raised, with its traceback, or if the side died; with
        the end of its log.
        """
        if not self.is_started:
            return OUR_ANSWERS.get(function, {})
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(
                json.dumps({"function": function, "arguments": arguments}) + "\n"
            )
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        contents = json.loads(answer) if answer else {}
        if "result" in contents:
            OUR_ANSWERS[function] = {
                name: unpacked(value) for name, value in contents["result"].items()
            }
            return OUR_ANSWERS[function]
        self.close()  # what it prints as it ends is in the log then
        end = "\n".join(
            Path(self.log.name).read_text(errors="replace").splitlines()[-LINES_OF_LOG:]
        )
        why = contents.get(
            "traceback", f"It ended with status {self.process.returncode} and gave no answer.\n"
        )
        raise RuntimeError(
            f"{self.name}: {function} failed.\n{why}The end of {self.log.name}:\n{end}"
        )

    def close(self) -> None:
        """Ends the side's process, which has 30 s for it."""
        if not self.is_started:
            return
        assert self.process.stdin
        # The process is gone, and something was left to be sent
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def interleave(
    sides: Sequence[Side], rounds: int, function: str, *, warm_up: int = 2, **arguments: Any
) -> dict[str, list[dict[str, Any]]]:
    """Calls the function on all sides in turn, in another order each round; the results after the
    warm-up, by side.

    A small benchmark does not warm up.
    """
    warm_up = sized(warm_up, 0)
    results: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for index in range(warm_up + rounds):
        start = index % len(sides)
        order = [*sides[start:], *sides[:start]]
        # Our answer comes before the peers that repeat it
        order.sort(key=lambda side: not side.is_started)
        for side in order:
            result = side.call(function, **arguments)
            if index >= warm_up:
                results[side.name].append(result)
    return results


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some measurements."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.greatest:.3g})"


def copy_rate(num_bytes: int) -> float:
    """Bytes a second of one thread's copy between two buffers of this size that are in memory
    already."""
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.ones(num_bytes, dtype=np.uint8)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return num_bytes / statistics.median(seconds)


class Report:
    """What a benchmark found: measurements and targets; printed, and written to a JSON file.

    Args:
        name: of the benchmark, also of its file.
        title: what it measures, in one line.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.rows: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self._busy_before = _busy_seconds()
        print(f"{title}\n", flush=True)

    def row(self, what: str, unit: str, values: Sequence[float], **ratios: float) -> None:
        """A measurement: its spread, and what it is a ratio of, e.g. `of_memcpy=0.4`."""
        spread = Spread.of([float(value) for value in values])
        self.rows.append(
            {
                "what": what,
                "unit": unit,
                **spread.__dict__,
                "rounds": len(values),
                "ratios": {name: float(ratio) for name, ratio in ratios.items()},
            }
        )
        shown = ", ".join(f"{name.replace('_', ' ')} {ratio:.3g}" for name, ratio in ratios.items())
        print(f"  {what:<58} {spread} {unit}{'; ' + shown if shown else ''}", flush=True)

    def skip(self, what: str, why: str) -> None:
        """A measurement that this machine cannot make."""
        self.rows.append({"what": what, "why": why})
        print(f"  {what:<58} {why}", flush=True)

    def failure(self, what: str, why: str) -> None:
        """A measurement or check that went wrong."""
        self.failures.append(what)
        self.skip(what, f"FAILED: {why}")

    def target(
        self, what: str, value: float, comparison: Literal[">=", "<="], bound: float
    ) -> None:
        """A number that must be reached."""
        value, bound = float(value), float(bound)  # of NumPy's numbers too
        reached = value >= bound if comparison == ">=" else value <= bound
        self.targets.append(
            {
                "what": what,
                "value": value,
                "comparison": comparison,
                "bound": bound,
                "reached": reached,
            }
        )
        print(
            f"  {'reached' if reached else 'MISSED ':<8} {what}: {value:.4g}, wanted {comparison} "
            f"{bound:g}",
            flush=True,
        )

    def note(self, text: str) -> None:
        """A sentence that a reader of the numbers needs."""
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def write(self, folder: Path = RESULTS) -> None:
        """Writes `<name>.json`; call it once the sides are closed, whose CPU time then counts as
        this run's own."""
        busy = _busy_seconds()[0] - self._busy_before[0]
        own = _busy_seconds()[1] - self._busy_before[1]
        elapsed = _busy_seconds()[2] - self._busy_before[2]
        folder.mkdir(parents=True, exist_ok=True)
        contents = {
            "benchmark": self.name,
            "title": self.title,
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            # Ray's own processes are not children of this one, so this is an upper bound where Ray
            # runs.
            "cores_used_by_others": round(max(0.0, busy - own) / elapsed, 2),
            "rows": self.rows,
            "targets": self.targets,
            "notes": self.notes,
        }
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(contents, indent=1) + "\n")
        print(f"\n  {path}\n", flush=True)


def machine() -> str:
    """One line on the processor."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {models[0] if models else platform.processor()}"


def _busy_seconds() -> tuple[float, float, float]:
    """(CPU seconds of the whole machine, CPU seconds of this process and its finished children,
    wall seconds)."""
    with open("/proc/stat") as file:
        user, nice, system = (int(ticks) for ticks in file.readline().split()[1:4])
    own = os.times()
    return (
        (user + nice + system) / os.sysconf("SC_CLK_TCK"),
        own.user + own.system + own.children_user + own.children_system,
        time.monotonic(),
    )
