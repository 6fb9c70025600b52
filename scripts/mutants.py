"""Changes the source in many small ways and counts how many of them a test notices: `make mutants`.

Each mutant is a copy of the repository with one change. A process that has imported torch and its like already is
forked for it, imports the copy and runs the tests that cover the changed line, the quickest files first, until one
fails. Tests with real Ray processes run only for lines that no test of one process covers. What was run is kept in
`build/mutants` until the source or a test changes, so that a reason can be written down without another hour.
"""

import compileall
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest
from mutations import Mutant, draw, mutants_of, replacement

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
WANTED = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())
NUM_PROCESSES = 2
TIMED_OUT = 70
KINDS = {"one process": "not ray and not vllm and not proof", "ray": "ray and not vllm and not proof"}
"""Tests by the processes they start, the preferred ones first, as pytest selects them by markers."""
MISSED = ("survived", "timed out", "no test runs it")
PREFACE = """
A mutant is the source with one small change. What can be changed: the algorithms, the trainer's step with balancing,
metrics and scoring, the mini-batches, the engine, the optimizer, actor and critic, and what makes them from the
configuration (`scripts/mutants.toml` names the files). How: the operators of mutmut at every place that executes, and
besides them a condition forced to true or to false, neighbouring arguments swapped, and a call left out. Not changed:
annotations, imports, documentation, and the wording of error messages. Those to try are drawn evenly, by a fixed seed;
changes that a review once found unnoticed are always among them. A mutant is killed when a test that runs its line
fails. A time-out does not count as killed.
"""
WARM = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.testing", "tensordict",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "hypothesis", "hydra",
    "pydantic", "pyarrow.parquet", "pebble", "rich.console", "ray", "matplotlib.figure", "pytest_timeout",
)  # fmt: skip

Job = tuple[Any, Callable[[Path], Callable[[], int]], float]


@dataclass(frozen=True)
class Baseline:
    """What the tests of one kind do on the unchanged source."""

    seconds: dict[str, float]
    """Of each test."""
    tests: dict[str, dict[str, list[str]]]
    """By file and line: the tests that run it; "" for what importing it runs."""

    def covering(self, file: str, lines: range) -> set[str]:
        by_line = self.tests.get(file, {})
        return {test for line in lines for test in by_line.get(str(line), ())}


IN_OTHER_PROCESSES = """
import os

if "COVERED_TEST" in os.environ:
    import coverage

    folder = os.path.dirname(__file__)
    coverage.Coverage(
        data_file=folder + "/.covered", data_suffix=True, auto_data=True, config_file=False,
        include=[folder + "/verl_like/*"], context=os.environ["COVERED_TEST"],
    ).start()
"""
"""Python runs this at the start of each process that a test starts: ranks of a group, reward processes."""


class Recorder:
    """A pytest plugin: which test runs which lines, and for how long.

    What a fixture runs counts for all tests of the file, because they may share it.
    """

    def __init__(self, measured: coverage.Coverage) -> None:
        self.coverage = measured
        self.seconds: dict[str, float] = defaultdict(float)
        self.of_file: dict[str, list[str]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.of_file[item.location[0]].append(item.nodeid)
        self._switch(f"file {item.location[0]}")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._switch(item.nodeid)
        return (yield)

    def _switch(self, context: str) -> None:
        self.coverage.switch_context(context)
        os.environ["COVERED_TEST"] = context

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def baseline(self, root: Path) -> dict[str, Any]:
        tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        parts = [self.coverage.get_data(), *(coverage.CoverageData(str(path)) for path in root.glob(".covered.*"))]
        for data in parts:
            data.read()
            for path in data.measured_files():
                for line, contexts in data.contexts_by_lineno(path).items():
                    of_line = tests[str(Path(path).relative_to(root))][line]
                    of_line.update(test for context in contexts for test in self._tests(context))
        return {"seconds": self.seconds, "tests": tests}

    def _tests(self, context: str) -> list[str]:
        return self.of_file[context.removeprefix("file ")] if context.startswith("file ") else [context]


class Chosen:
    """A pytest plugin: only some tests, those of quick files first, each with a limit; and tests not known before."""

    def __init__(self, chosen: set[str], seconds: dict[str, float]) -> None:
        self.chosen = chosen
        self.seconds = seconds
        self.timed_out = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.chosen or item.nodeid not in self.seconds]
        total: dict[str, float] = defaultdict(float)
        for item in items:
            total[item.location[0]] += self.seconds.get(item.nodeid, 0.0)
        items.sort(key=lambda item: total[item.location[0]])
        for item in items:
            of_file = [s for test, s in self.seconds.items() if test.startswith(f"{item.location[0]}::")]
            item.add_marker(pytest.mark.timeout(30 + 5 * max(of_file, default=0.0)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.timed_out |= report.failed and "from pytest-timeout" in report.longreprtext


def measure(copy: Path, kind: str) -> int:
    """In a child: runs all tests of a kind on the unchanged source; writes the baseline."""
    measured = coverage.Coverage(data_file=None, config_file=False, include=[f"{copy}/verl_like/*"])
    recorder = Recorder(measured)
    measured.start()
    code = run_pytest(copy, ["tests/unit", "tests/end_to_end"], kind, recorder)
    measured.stop()
    (WORK / f"baseline {kind}.json").write_text(json.dumps(recorder.baseline(copy), default=sorted))
    return code


def run_pytest(copy: Path, paths: list[str], kind: str, plugin: object) -> int:
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={copy}/.tmp", "--hypothesis-seed=0"]
    return pytest.main([*options, "-m", KINDS[kind], *paths], plugins=[plugin])


def fork(copy: Path, run: Callable[[], int]) -> int:
    """Starts `run` in a process group of its own that sees the copy as the repository; returns the process id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    log = os.open(copy.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    # Two mutants of a file may have equal times and sizes, which is all that a cached module is told apart by.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": f"{copy}:{os.environ['PYTHONPATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        code = run()
    finally:
        sys.stdout.flush()
    os._exit(code)


def make_copies() -> list[Path]:
    """As many copies of the repository as there are processes."""
    files = git("ls-files").splitlines()
    folders = [WORK / f"copy{i}" for i in range(NUM_PROCESSES)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
        (folder / "sitecustomize.py").write_text(IN_OTHER_PROCESSES)
        compileall.compile_dir(folder / "verl_like", quiet=1)
    return folders


def in_parallel(copies: list[Path], jobs: list[Job]) -> Iterator[tuple[Any, int, Path]]:
    """Runs (what, its start in a copy, seconds it may take), one in each copy; yields (what, exit status, copy)."""
    waiting, idle, running = list(reversed(jobs)), list(copies), {}
    while waiting or running:
        while waiting and idle:
            copy, (what, prepare, limit) = idle.pop(), waiting.pop()
            running[fork(copy, prepare(copy))] = what, copy, time.monotonic() + limit
        time.sleep(0.02)
        for child, (what, copy, deadline) in list(running.items()):
            if late := time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            done, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if done:
                yield what, TIMED_OUT if late else os.waitstatus_to_exitcode(status), copy
                del running[child]
                idle.append(copy)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # what it left behind


def baselines(copies: list[Path]) -> dict[str, Baseline]:
    """Of both kinds of tests; exits if one of them fails on the unchanged source."""
    jobs = [(kind, lambda copy, kind=kind: partial(measure, copy, kind), 1800.0) for kind in KINDS]
    for kind, status, copy in in_parallel(copies, jobs):
        if status:
            sys.exit(f"The tests ({kind}) fail on the unchanged source: see {copy.with_suffix('.log')}")
    return {kind: Baseline(**json.loads((WORK / f"baseline {kind}.json").read_text())) for kind in KINDS}


def tests_for(mutant: Mutant, known: dict[str, Baseline]) -> tuple[str, set[str]]:
    """The tests that run the mutant's statement; where importing runs it, those of its function, then of its file."""
    imported = False
    for lines in (mutant.statement, mutant.function, range(1, mutant.source.count("\n") + 2)):
        for kind, baseline in known.items():
            covering = baseline.covering(mutant.file, lines)
            imported |= "" in covering
            if covering - {""}:
                return kind, covering - {""}
        if not imported:
            break
    return "one process", set()


def try_one(mutant: Mutant, kind: str, tests: set[str], baseline: Baseline, copy: Path) -> Callable[[], int]:
    """Puts the mutant into the copy and returns what runs the tests there."""
    (copy / mutant.file).write_text(mutant.source)
    chosen = Chosen(tests, baseline.seconds)

    def run() -> int:
        code = run_pytest(copy, sorted({test.split("::")[0] for test in tests}), kind, chosen)
        return TIMED_OUT if code and chosen.timed_out else code

    return run


def try_all(mutants: list[Mutant], copies: list[Path], known: dict[str, Baseline]) -> Iterator[tuple[Mutant, str]]:
    """Yields each mutant with what came of it: "killed", "survived", "timed out" or "no test runs it"."""
    jobs = []
    for mutant in mutants:
        kind, tests = tests_for(mutant, known)
        if not tests:
            yield mutant, "no test runs it"
            continue
        limit = 60 + 5 * sum(known[kind].seconds[test] for test in tests)
        jobs.append((mutant, partial(try_one, mutant, kind, tests, known[kind]), limit))
    outcomes = {0: "survived", TIMED_OUT: "timed out"}
    for mutant, status, copy in in_parallel(copies, jobs):
        assert status != pytest.ExitCode.NO_TESTS_COLLECTED, f"no tests for {mutant.key}: see {copy}.log"
        (copy / mutant.file).write_text(mutant.original)
        yield mutant, outcomes.get(status, "killed")


def all_mutants() -> tuple[int, list[Mutant]]:
    """How many mutants there are, and those that are tried: the named ones and those that were drawn."""
    generated = [mutant for entry in WANTED["source"] for file in sorted(ROOT.glob(entry["files"]))
                 if file.name != "__init__.py"
                 for mutant in mutants_of(ROOT, str(file.relative_to(ROOT)), entry.get("functions", ()))]  # fmt: skip
    named = [replacement(ROOT, entry["file"], entry["before"], entry["after"]) for entry in WANTED["named"]]
    return len(generated), [*named, *draw(generated, WANTED["number"], WANTED["seed"])]


def state_of_the_source() -> str:
    paths = sorted(path for part in ("verl_like", "tests", "scripts") for path in (ROOT / part).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def reasons() -> dict[tuple[str, str, str], str]:
    """What is written down about survivors, by `Mutant.key`."""
    text = "\n".join
    return {
        (entry["file"], text(entry["before"]), text(entry["after"])): entry["reason"]
        for entry in tomllib.loads((ROOT / "scripts" / "survivors.toml").read_text()).get("survivor", [])
    }


def diff(mutant: Mutant) -> list[str]:
    return [*(f"- {line}" for line in mutant.before), *(f"+ {line}" for line in mutant.after)]


def page(num_all: int, outcomes: list[tuple[Mutant, str]], why: dict[tuple[str, str, str], str]) -> str:
    """docs/mutants.md."""
    columns = ("killed", *MISSED)

    def table(of: Callable[[Mutant], str]) -> list[str]:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant, outcome in outcomes:
            counts[of(mutant)][outcome] += 1
        rows = [f"| {name} | " + " | ".join(str(counts[name][c]) for c in columns) + " |" for name in sorted(counts)]
        return [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns), *rows, ""]

    lines = [
        "# Mutants",
        "",
        f"Written by `make mutants` on {date.today()}, of commit {git('rev-parse', '--short', 'HEAD')}.",
        "",
        PREFACE.strip(),
        "",
        f"{summary(num_all, outcomes)}",
        "",
        *table(lambda mutant: mutant.file),
        *table(lambda mutant: mutant.operator),
        "## Those that no test notices",
        "",
    ]
    for mutant, outcome in outcomes:
        if outcome != "killed":
            lines += [f"{mutant.file}:{mutant.line}, {outcome}: {why.get(mutant.key, 'NO REASON GIVEN')}", ""]
            lines += ["```diff", *diff(mutant), "```", ""]
    return "\n".join(lines)


def summary(num_all: int, outcomes: list[tuple[Mutant, str]]) -> str:
    counts = Counter(outcome for _, outcome in outcomes)
    parts = ", ".join(f"{counts[name]} {name}" for name in ("killed", *MISSED))
    share = counts["killed"] / len(outcomes)
    return f"Of {num_all} mutants {len(outcomes)} were tried: {parts}. {share:.1%} were killed."


def main() -> None:
    for module in WARM:
        importlib.import_module(module)
    num_all, mutants = all_mutants()
    why, kept = reasons(), WORK / f"{state_of_the_source()[:16]}.json"
    WORK.mkdir(parents=True, exist_ok=True)
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    names = {f"{mutant.line} {mutant.key}": mutant for mutant in mutants}
    left = [mutant for name, mutant in names.items() if name not in results]
    print(f"{num_all} mutants, {len(mutants)} are tried, {len(left)} of them now.", flush=True)
    copies = make_copies() if left else []
    for mutant, outcome in try_all(left, copies, baselines(copies)) if left else ():
        results[f"{mutant.line} {mutant.key}"] = outcome
        kept.write_text(json.dumps(results))
        if outcome != "killed":
            print(f"{mutant.file}:{mutant.line}: {outcome}", *diff(mutant), sep="\n    ", flush=True)
        elif mutant.key in why:
            print(f"{mutant.file}:{mutant.line}: killed, its reason is not needed", *diff(mutant), sep="\n    ")
    outcomes = [(mutant, results[name]) for name, mutant in names.items()]
    (ROOT / "docs" / "mutants.md").write_text(page(num_all, outcomes, why))
    print(summary(num_all, outcomes))
    missed = [mutant for mutant, outcome in outcomes if outcome != "killed"]
    unexplained = [f"{mutant.file}:{mutant.line}" for mutant in missed if mutant.key not in why]
    if unexplained:
        sys.exit(f"No reason in scripts/survivors.toml for {', '.join(unexplained)}")
    if len(missed) > 0.05 * len(outcomes):
        sys.exit("Less than 95% were killed.")


if __name__ == "__main__":
    main()
