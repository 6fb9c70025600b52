"""How mutants are run: the tests' coverage, copies of the repository, and processes that are forked
from ready ones."""

import compileall
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import _pytest.main
import coverage
import pytest
from mutations import Mutant
from pytest import ExitCode

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
NUM_PROCESSES = 2
ORIGINAL, *COPIES = [WORK / f"copy{i}" for i in range(NUM_PROCESSES + 1)]
TIMED_OUT = 70
NOT_REPLACED = 71
KINDS = {
    "one process": "not ray and not vllm and not proof",
    "ray": "ray and not vllm and not proof",
    "vllm": "vllm and not proof",
}
"""Tests by the processes they start, the preferred ones first, as pytest selects them by
markers."""
BASELINE_LIMIT_S = 3600.0
OPTIONS = ["-x", "-q", "-s", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
PATHS = ["tests", "--ignore=tests/architecture", "--ignore=tests/ray_cpu"]

Job = tuple[Any, Callable[[Path], Callable[[], int]], float]
"""What, its start in a copy, and the seconds it may take."""
Note = Callable[[Mutant, str], None]
"""Gets a mutant and its outcome: "killed", "survived", "timed out" or "no test runs it"."""


@dataclass(frozen=True)
class Baseline:
    """What the tests of one kind do on the unchanged source."""

    seconds: dict[str, float]
    """Of each test."""
    tests: dict[str, dict[str, list[str]]]
    """By file and line: the tests that run it and pass; "" for what importing it runs."""
    failed: list[str]

    def covering(self, file: str, lines: range) -> set[str]:
        by_line = self.tests.get(file, {})
        return {test for line in lines for test in by_line.get(str(line), ())}


IN_OTHER_PROCESSES = """
import atexit
import contextlib
import os
import threading

if "COVERED_TEST" in os.environ:
    with contextlib.suppress(Exception):  # not there for a test that sets PYTHONPATH
        import coverage

        folder = os.path.dirname(__file__)
        covered = coverage.Coverage(
            data_file=folder + "/.covered", data_suffix=True, config_file=False,
            include=[folder + "/verl_like/*"], context=os.environ["COVERED_TEST"],
        )
        covered.set_option("run:disable_warnings", ["no-data-collected"])
        covered.start()
        saving, ending = threading.Lock(), threading.Event()

        def save():  # the process may write no more, and its test reads what it prints
            with saving, contextlib.suppress(BaseException):
                covered.save()

        def save_now_and_then():  # Ray ends its processes without a word
            while not ending.wait(1):
                save()

        def start_saving():
            threading.Thread(target=save_now_and_then, daemon=True).start()

        def go_on_in_child():  # workers are forked, and threads are not
            saving.release()
            start_saving()

        def save_at_exit():
            ending.set()
            save()

        start_saving()
        atexit.register(save_at_exit)
        # A fork within a save would have locks that nobody opens.
        os.register_at_fork(
            before=saving.acquire, after_in_parent=saving.release, after_in_child=go_on_in_child
        )
"""
"""Python runs this at the start of each process that a test starts: ranks of a group, reward
processes.

The process goes on as it would without it, whatever becomes of the coverage.
"""


class Recorder:
    """A pytest plugin: which test runs which lines, and for how long.

    What a fixture runs counts for all tests of the file, because they may share it.
    """

    def __init__(self, measured: coverage.Coverage) -> None:
        self.coverage = measured
        self.seconds: dict[str, float] = defaultdict(float)
        self.of_file: dict[str, list[str]] = defaultdict(list)
        self.failed: set[str] = set()

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
        if report.failed:
            self.failed.add(report.nodeid)

    def baseline(self, root: Path) -> dict[str, Any]:
        tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        parts = [
            self.coverage.get_data(),
            *(coverage.CoverageData(str(path)) for path in root.glob(".covered.*")),
        ]
        for data in parts:
            # The file of a process may be cut: one that was killed as it wrote, or whose files have
            # a limit.
            with contextlib.suppress(coverage.exceptions.DataError):
                data.read()
                for path in data.measured_files():
                    for line, contexts in data.contexts_by_lineno(path).items():
                        of_line = tests[str(Path(path).relative_to(root))][line]
                        of_line.update(
                            {test for context in contexts for test in self._tests(context)}
                            - self.failed
                        )
        return {"seconds": self.seconds, "tests": tests, "failed": self.failed}

    def _tests(self, context: str) -> list[str]:
        return (
            self.of_file[context.removeprefix("file ")]
            if context.startswith("file ")
            else [context]
        )


def measure(kind: str, file: Path, copy: Path) -> Callable[[], int]:
    """Returns what runs all tests of a kind on the unchanged source and writes the baseline."""

    def run() -> int:
        measured = coverage.Coverage(
            data_file=None, config_file=False, include=[f"{copy}/verl_like/*"]
        )
        recorder = Recorder(measured)
        measured.start()
        code = pytest.main([*OPTIONS, "--maxfail=0", "-m", KINDS[kind], *PATHS], plugins=[recorder])
        measured.stop()
        if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            file.write_text(json.dumps(recorder.baseline(copy), default=sorted))
        return code

    return run


def baselines(state: str) -> dict[str, Baseline]:
    """Of all kinds of tests in this state of the source, as they were when it was first tried."""
    files = {kind: WORK / f"{state} {kind}.json" for kind in KINDS}
    jobs = [
        (kind, partial(measure, kind, file), BASELINE_LIMIT_S)
        for kind, file in files.items()
        if not file.is_file()
    ]
    for kind, status, copy in in_parallel(jobs):
        if not files[kind].is_file():
            sys.exit(
                f"The tests ({kind}) did not run to their end (status {status}): see {copy}.log"
            )
    return {kind: Baseline(**json.loads(file.read_text())) for kind, file in files.items()}


def run_new_tests(seconds: dict[str, float]) -> bool:
    """Runs the tests that no baseline has, on the unchanged source, and returns whether there are
    any. Exits if one fails, because it would seem to kill each mutant."""

    def start(copy: Path) -> Callable[[], int]:
        options = [*OPTIONS, "-m", "not proof", *PATHS]
        return lambda: pytest.main(options, plugins=[Chosen(set(), seconds)])

    ((_, status, copy),) = in_parallel([("new tests", start, BASELINE_LIMIT_S)])
    if status not in (ExitCode.OK, ExitCode.NO_TESTS_COLLECTED):
        sys.exit(f"A test that is new fails on the unchanged source: see {copy}.log")
    return status == ExitCode.OK


def make_copies() -> None:
    """The repository in each of the folders."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    for folder in (ORIGINAL, *COPIES):
        shutil.rmtree(folder, ignore_errors=True)
        for file in filter(None, files):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
        (folder / ".venv").symlink_to(ROOT / ".venv")  # for scripts that look there
        (folder / "tmp").mkdir()
        (folder / "sitecustomize.py").write_text(IN_OTHER_PROCESSES)
        compileall.compile_dir(folder / "verl_like", quiet=1)


def fork(copy: Path, run: Callable[[], int]) -> int:
    """Starts `run` in a process group of its own that sees the copy as the repository; returns the
    process id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    log = os.open(f"{copy}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path != str(ORIGINAL))]
    # Two mutants of a file may have equal times and sizes, which is all that a cached module is
    # told apart by.
    sys.dont_write_bytecode = True
    tools = Path(coverage.__file__).parents[1]
    os.environ |= {
        "PYTHONPATH": f"{copy}:{tools}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DEBUG_TEMPROOT": f"{copy}/tmp",
    }
    code = 1
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def in_parallel(jobs: list[Job]) -> Iterator[tuple[Any, int, Path]]:
    """Runs one job in each copy at a time; yields (what, exit status, copy)."""
    waiting = list(reversed(jobs))
    idle = list(COPIES)
    running = {}
    while waiting or running:
        while waiting and idle:
            copy = idle.pop()
            (what, start, limit) = waiting.pop()
            running[fork(copy, start(copy))] = what, copy, time.monotonic() + limit
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


def tests_for(mutant: Mutant, known: dict[str, Baseline]) -> set[str]:
    """The tests that run the mutant's statement; where importing runs it, all those of its function
    or file.

    Of the first kind that has any.
    """
    return next(filter(None, _covering(mutant, known)), set())


def other_tests_for(mutant: Mutant, known: dict[str, Baseline]) -> set[str]:
    """The tests of the other kinds that run it."""
    return set[str]().union(*_covering(mutant, known)) - tests_for(mutant, known)


def _covering(mutant: Mutant, known: dict[str, Baseline]) -> list[set[str]]:
    imported = any(
        "" in baseline.covering(mutant.file, mutant.statement) for baseline in known.values()
    )
    lines = mutant.function if imported else mutant.statement
    return [baseline.covering(mutant.file, lines) - {""} for baseline in known.values()]


class Chosen:
    """A pytest plugin: only some tests, those of quick files first, each with a limit; and tests
    not known before."""

    def __init__(self, tests: set[str], seconds: dict[str, float]) -> None:
        self.tests = tests
        self.seconds = seconds
        self.timed_out = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item for item in items if item.nodeid in self.tests or item.nodeid not in self.seconds
        ]
        total: dict[str, float] = defaultdict(float)
        for item in items:
            total[item.location[0]] += self.seconds.get(item.nodeid, 0.0)
        items.sort(key=lambda item: total[item.location[0]])
        for item in items:
            of_file = [
                s for test, s in self.seconds.items() if test.startswith(f"{item.location[0]}::")
            ]
            item.add_marker(pytest.mark.timeout(30 + 5 * max(of_file, default=0.0)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.timed_out |= report.failed and "from pytest-timeout" in report.longreprtext


class Template:
    """A pytest plugin in a process that has imported and collected everything: each mutant is a
    fork of it.

    There the code of the functions that differ is replaced. What importing a module executes cannot
    be replaced so.
    """

    def __init__(
        self, jobs: list[tuple[Mutant, set[str]]], seconds: dict[str, float], note: Note
    ) -> None:
        self.jobs = jobs
        self.seconds = seconds
        self.note = note

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        try_all(self.jobs, self.seconds, self.note, partial(self.start, session))
        return True

    def start(
        self, session: pytest.Session, mutant: Mutant, tests: set[str], copy: Path
    ) -> Callable[[], int]:
        (copy / mutant.file).write_text(mutant.source)  # for the processes that a test starts

        def run() -> int:
            chosen = Chosen(tests, self.seconds)
            chosen.pytest_collection_modifyitems(session.items)
            session.config.pluginmanager.register(chosen)
            if not session.items or not replace_functions(mutant):
                return NOT_REPLACED
            with contextlib.suppress(session.Failed, session.Interrupted):
                _pytest.main.pytest_runtestloop(session)
            return TIMED_OUT if chosen.timed_out else int(session.testsfailed > 0)

        return run


def replace_functions(mutant: Mutant) -> bool:
    """Puts the mutant's code into all functions of this process that have the original's; False if
    there are none."""
    path = str(ORIGINAL / mutant.file)
    before, after = (
        _codes(compile(text, path, "exec", dont_inherit=True))
        for text in (mutant.original, mutant.source)
    )
    if any(
        not _is_function(code) and _own(code) != _own(after[name]) for name, code in before.items()
    ):
        return False
    new = {
        code: after[name] for name, code in before.items() if name in after and code != after[name]
    }
    functions = [
        f
        for f in gc.get_objects()
        if isinstance(f, FunctionType) and f.__code__.co_filename == path
    ]
    changed = [function for function in functions if function.__code__ in new]
    if any(
        len(function.__code__.co_freevars) != len(new[function.__code__].co_freevars)
        for function in changed
    ):
        return False
    for function in changed:
        function.__code__ = new[function.__code__]
    return bool(changed)


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """All code in a module by qualified name, and number among equal names."""
    found: dict[tuple[str, int], CodeType] = {}
    waiting = [code]
    while waiting:
        code = waiting.pop()
        number = sum(name == code.co_qualname for name, _ in found)
        found[code.co_qualname, number] = code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & CO_OPTIMIZED)


def _own(code: CodeType) -> tuple:
    """What the code does itself, without the functions in it."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, repr(constants), code.co_names


def start_anew(
    seconds: dict[str, float], mutant: Mutant, tests: set[str], copy: Path
) -> Callable[[], int]:
    """Puts the mutant into the copy and returns what imports it and runs the tests."""
    (copy / mutant.file).write_text(mutant.source)

    def run() -> int:
        try:
            importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
        except Exception:  # every test notices that; pytest would say that it was called wrongly
            traceback.print_exc()
            return int(ExitCode.TESTS_FAILED)
        chosen = Chosen(tests, seconds)
        code = pytest.main(
            [*OPTIONS, "-m", "not proof", *{t.split("::")[0] for t in tests}], plugins=[chosen]
        )
        return TIMED_OUT if code and chosen.timed_out else code

    return run


def try_all(
    jobs: list[tuple[Mutant, set[str]]],
    seconds: dict[str, float],
    note: Note,
    start: Callable[[Mutant, set[str], Path], Callable[[], int]],
) -> None:
    """Runs each mutant with its tests and tells `note`, but for those that could not be put into
    place."""
    outcomes = {0: "survived", TIMED_OUT: "timed out"}
    limits = [60 + 5 * sum(seconds[test] for test in tests) for _, tests in jobs]
    for mutant, status, copy in in_parallel(
        [
            (mutant, partial(start, mutant, tests), limit)
            for (mutant, tests), limit in zip(jobs, limits, strict=True)
        ]
    ):
        # pytest's exits that say nothing about the mutant
        unclear = {ExitCode.INTERNAL_ERROR, ExitCode.USAGE_ERROR, ExitCode.NO_TESTS_COLLECTED}
        assert status not in unclear, f"no result for {mutant.key}: see {copy}.log"
        (copy / mutant.file).write_text(mutant.original)
        if status != NOT_REPLACED:
            note(mutant, outcomes.get(status, "killed"))


def run_template(
    jobs: list[tuple[Mutant, set[str]]], seconds: dict[str, float], note: Note
) -> None:
    """Tries all mutants that a fork of a ready process can become."""

    def run() -> int:
        return pytest.main(
            [*OPTIONS, "-m", "not proof", *PATHS], plugins=[Template(jobs, seconds, note)]
        )

    _, status = os.waitpid(fork(ORIGINAL, run), 0)
    if status:
        sys.exit(f"The process that mutants are forked from failed: see {ORIGINAL}.log")
