"""Changes the source in many small ways and counts how many of them a test notices: `make mutants`.

Each mutant is run by the tests of `make test` that cover the changed line, the quickest files
first, until one fails; tests with real Ray processes or vLLM only where no other test covers it.
What then survives without a reason in `scripts/survivors.toml` is run by these too. `mutations.py`
makes the mutants, `mutant_runs.py` runs them. What was run is kept in `build/mutants` until the
source changes, so that a reason can be written down, or a test added, without another hour: when
the tests have changed, those that were killed stay so, and the others are tried again. Delete the
folder after a test was taken away or demands less. A mutant with a reason is not tried, because it
takes longest: all tests of its line would run. It counts as one that no test notices.

`make mutants AREAS="data export"` tries the mutants of these areas alone, and leaves
docs/mutants.md as it is.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial

from mutant_runs import (
    ROOT,
    WORK,
    baselines,
    make_copies,
    other_tests_for,
    run_new_tests,
    run_template,
    start_anew,
    tests_for,
    try_all,
)
from mutations import Mutant, Named, draw, mutants_of, replacement

WANTED = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())
MISSED = ("survived", "timed out", "no test runs it")
Outcomes = list[tuple[Mutant, str]]
"""Each mutant that was tried, with its outcome."""
LEAST_SHARE = 0.95
LEAST_SHARE_OF_AN_AREA = 0.9
PREFACE = """
A mutant is the source with one small change. What can be changed are the files of the areas below,
which `scripts/mutants.toml` names. How: the operators of mutmut at every place that executes, and
besides them a condition forced to true or to false, neighbouring arguments swapped, and a call left
out. Not changed: annotations, imports, documentation, and the wording of error messages. Those to
try are drawn by a fixed seed, some of each area and the rest evenly over all; changes that a review
once found unnoticed are always among them. A mutant is killed when a test of `make test` that runs
its line fails. Those that time out are counted apart. Those with a reason below are not tried
again. """
WARM = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.testing",
    "tensordict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "hypothesis",
    "hydra",
    "pydantic",
    "pyarrow.parquet",
    "rich.console",
    "ray",
    "matplotlib.figure",
    "pytest_timeout",
)


def files_by_area() -> dict[str, list[str]]:
    """The files of each area; of the packages' own files those that hold code. Raises if a pattern
    finds none."""
    files: dict[str, list[str]] = {}
    for area in WANTED["area"]:
        files[area["name"]] = []
        for pattern in area["files"]:
            found = [file for file in sorted(ROOT.glob(pattern)) if file.name != "__init__.py"]
            assert found, f"scripts/mutants.toml: no file is {pattern}"
            files[area["name"]] += [str(file.relative_to(ROOT)) for file in found]
    return files


def all_mutants() -> tuple[int, list[Mutant]]:
    """How many mutants there are, and those that are tried: the named ones and those that were
    drawn."""
    functions = {
        file: names for area in WANTED["area"] for file, names in area.get("functions", {}).items()
    }
    generated: dict[str, list[Named]] = {}
    area_of: dict[str, str] = {}
    for area, files in files_by_area().items():
        generated[area] = []
        for file in files:
            area_of[file] = area
            generated[area] += mutants_of(ROOT, file, area, functions.get(file, ()))
    named = [
        replacement(
            ROOT,
            entry["file"],
            area_of.get(entry["file"], "others"),
            entry["before"],
            entry["after"],
        )
        for entry in WANTED["named"]
    ]
    drawn = draw(generated.values(), WANTED["number"], WANTED["least_of_an_area"], WANTED["seed"])
    return sum(map(len, generated.values())), [*named, *drawn]


def state_of(folder: str) -> str:
    """A digest of the Python files in a folder of the repository."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def survivors() -> dict[tuple[str, str, str], dict[str, str]]:
    """What is written down about survivors, by `Mutant.key`: the `reason`, and the `outcome` unless
    it is that they survived."""
    text = "\n".join
    written = tomllib.loads((ROOT / "scripts" / "survivors.toml").read_text())
    return {
        (entry["file"], text(entry["before"]), text(entry["after"])): entry
        for entry in written["survivor"]
    }


def diff(mutant: Mutant) -> list[str]:
    return [*(f"- {line}" for line in mutant.before), *(f"+ {line}" for line in mutant.after)]


def page(
    num_all: int, outcomes: Outcomes, why: dict[tuple[str, str, str], str], num_before: int
) -> str:
    """docs/mutants.md. `num_before` were killed before the tests were changed for the last time."""
    columns = ("killed", *MISSED)

    def table(of: Callable[[Mutant], str]) -> list[str]:
        rows = []
        for name, group in sorted(grouped(outcomes, of).items()):
            counts = Counter(outcome for _, outcome in group)
            cells = [
                name,
                *(str(counts[column]) for column in columns),
                f"{share_killed(group):.0%}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
        return [
            f"| | {' | '.join(columns)} | share killed |",
            "|---|" + "---|" * (len(columns) + 1),
            *rows,
            "",
        ]

    lines = [
        "# Mutants",
        "",
        f"Written by `make mutants` on {date.today()}, of commit "
        f"{git('rev-parse', '--short', 'HEAD')}.",
        "",
        PREFACE.strip(),
        "",
        f"{summary(num_all, outcomes)}",
        "",
        f"{num_before} of them were killed by the tests before the newest ones were added, and not "
        "tried again.",
        "",
        *table(lambda mutant: mutant.area),
        *table(lambda mutant: mutant.file),
        *table(lambda mutant: mutant.operator),
        "## Those that no test notices",
        "",
    ]
    for mutant, outcome in outcomes:
        if outcome != "killed":
            lines += [
                f"{mutant.file}:{mutant.line}, {outcome}: {why.get(mutant.key, 'NO REASON GIVEN')}",
                "",
            ]
            lines += ["```diff", *diff(mutant), "```", ""]
    return "\n".join(lines)


def summary(num_all: int, outcomes: Outcomes) -> str:
    counts = Counter(outcome for _, outcome in outcomes)
    parts = ", ".join(f"{counts[name]} {name}" for name in ("killed", *MISSED))
    return (
        f"Of {num_all} mutants {len(outcomes)} were tried: {parts}. "
        f"{share_killed(outcomes):.1%} were killed."
    )


def grouped(outcomes: Outcomes, of: Callable[[Mutant], str]) -> dict[str, Outcomes]:
    """The outcomes by what `of` says of their mutants."""
    groups: dict[str, Outcomes] = defaultdict(list)
    for mutant, outcome in outcomes:
        groups[of(mutant)].append((mutant, outcome))
    return groups


def share_killed(outcomes: Outcomes) -> float:
    """Of those that did not time out; 1 where there are none."""
    ended = [outcome for _, outcome in outcomes if outcome != "timed out"]
    return ended.count("killed") / len(ended) if ended else 1.0


class Results:
    """What came of each mutant, kept in a file until the source changes, and printed unless it was
    killed."""

    def __init__(self) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self.file = WORK / f"{state_of('verl_like')}.jsonl"
        self.tests = state_of("tests")
        # A forked process has another standard output
        self.output = os.fdopen(os.dup(1), "w", buffering=1)

    def note(self, mutant: Mutant, outcome: str) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps([name_of(mutant), outcome, self.tests]) + "\n")
        if outcome != "killed":
            print(
                f"{mutant.file}:{mutant.line}: {outcome}",
                *diff(mutant),
                sep="\n    ",
                file=self.output,
            )

    def lines(self) -> list[list[str]]:
        """Of each try: the mutant's name, its outcome, and the state of the tests."""
        return (
            [json.loads(line) for line in self.file.read_text().splitlines()]
            if self.file.is_file()
            else []
        )

    def read(self) -> dict[str, str]:
        """The last outcome of each mutant, with the present tests unless it was killed."""
        return {
            name: outcome
            for name, outcome, tests in self.lines()
            if outcome == "killed" or tests == self.tests
        }

    def num_killed_before(self) -> int:
        """How many were killed by earlier tests."""
        return sum(tests != self.tests for _, outcome, tests in self.lines() if outcome == "killed")

    def survived_once(self) -> list[str]:
        """Those that were tried once with the present tests and survived."""
        times = Counter(name for name, _, tests in self.lines() if tests == self.tests)
        return [
            name
            for name, outcome in self.read().items()
            if outcome == "survived" and times[name] == 1
        ]


def name_of(mutant: Mutant) -> str:
    return f"{mutant.line} {mutant.key}"


def tests_of_area(area: str, known_tests: Iterable[str]) -> set[str]:
    """Those of the files that run what no coverage sees."""
    files = next((each.get("tests", []) for each in WANTED["area"] if each["name"] == area), [])
    return {test for test in known_tests if test.partition("::")[0] in files}


def tests_that_read(file: str, known_tests: Iterable[str]) -> set[str]:
    """Those that read what importing this file sets, which no coverage shows."""
    files = WANTED["readers"].get(file, [])
    return {test for test in known_tests if test.partition("::")[0] in files}


def try_those_left(mutants: dict[str, Mutant], results: Results) -> list[str]:
    """Tries the mutants of which there is no result yet; returns the tests that fail on the
    unchanged source. `mutants` are those without a reason, by name."""

    def left() -> list[Mutant]:
        done = results.read()
        return [mutant for name, mutant in mutants.items() if name not in done]

    make_copies()
    known = baselines(state_of("verl_like"))
    seconds = {test: took for baseline in known.values() for test, took in baseline.seconds.items()}
    has_new_tests = bool(left()) and run_new_tests(seconds)
    tests = {}
    for name, mutant in mutants.items():
        covering = tests_for(mutant, known) | tests_that_read(mutant.file, seconds)
        tests[name] = covering or tests_of_area(mutant.area, seconds)
    for mutant in left():
        # Tests that are in no baseline may run it.
        if not tests[name_of(mutant)] and not has_new_tests:
            results.note(mutant, "no test runs it")
    if left():
        run_template([(mutant, tests[name_of(mutant)]) for mutant in left()], seconds, results.note)
    anew = [(mutant, tests[name_of(mutant)]) for mutant in left()]
    try_all(anew, seconds, results.note, partial(start_anew, seconds))
    again = []
    for name in results.survived_once():
        if mutant := mutants.get(name):
            again.append((mutant, other_tests_for(mutant, known)))
    try_all([job for job in again if job[1]], seconds, results.note, partial(start_anew, seconds))
    return [test for baseline in known.values() for test in baseline.failed]


def main() -> None:
    for module in WARM:
        importlib.import_module(module)
    num_all, drawn = all_mutants()
    chosen = sys.argv[1:]
    if unknown := set(chosen) - {mutant.area for mutant in drawn}:
        sys.exit(f"scripts/mutants.toml has no area {unknown}; it has {list(files_by_area())}")
    mutants = {name_of(mutant): mutant for mutant in drawn if not chosen or mutant.area in chosen}
    explained = survivors()
    why = {key: entry["reason"] for key, entry in explained.items()}
    results = Results()
    print(f"{num_all} mutants, {len(mutants)} are tried.", flush=True)
    for file, before, after in why.keys() - {mutant.key for mutant in drawn}:
        print(
            f"scripts/survivors.toml names a mutant of {file} that is not tried: {before} -> "
            f"{after}"
        )
    to_try = {name: mutant for name, mutant in mutants.items() if mutant.key not in explained}
    failed = try_those_left(to_try, results)
    outcome_of = results.read()
    outcomes: Outcomes = []
    for name, mutant in mutants.items():
        entry = explained.get(mutant.key)
        outcome = entry.get("outcome", "survived") if entry else outcome_of[name]
        outcomes.append((mutant, outcome))
    if not chosen:
        (ROOT / "docs" / "mutants.md").write_text(
            page(num_all, outcomes, why, results.num_killed_before())
        )
    print(summary(num_all, outcomes))
    shares = {
        area: share_killed(group)
        for area, group in grouped(outcomes, lambda mutant: mutant.area).items()
    }
    print(", ".join(f"{area} {share:.0%}" for area, share in shares.items()))
    missed = [mutant for mutant, outcome in outcomes if outcome != "killed"]
    unexplained = [f"{mutant.file}:{mutant.line}" for mutant in missed if mutant.key not in why]
    if failed:
        sys.exit(
            "These tests fail on the unchanged source, so that no mutant was tried on them: "
            f"{', '.join(failed)}"
        )
    if unexplained:
        sys.exit(f"No reason in scripts/survivors.toml for {', '.join(unexplained)}")
    if share_killed(outcomes) < LEAST_SHARE:
        sys.exit(f"Less than {LEAST_SHARE:.0%} were killed.")
    if low := [area for area, share in shares.items() if share < LEAST_SHARE_OF_AN_AREA]:
        sys.exit(f"Less than {LEAST_SHARE_OF_AN_AREA:.0%} were killed in {', '.join(low)}.")


if __name__ == "__main__":
    main()
