"""Changes the source in many small ways and counts how many of them a test notices: `make mutants`.

Each mutant is run by the tests that cover the changed line, the quickest files first, until one fails; tests with real
Ray processes only where no other test covers it. What then survives without a reason in `scripts/survivors.toml` is run
by all tests of these files, those with Ray too. `mutations.py` makes the mutants, `mutant_runs.py` runs them. What
was run is kept in `build/mutants` until the source or a test changes, so that a reason can be written down without
another hour.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import date
from functools import partial

from mutant_runs import ROOT, WORK, all_tests_for, baselines, make_copies, run_template, start_anew, tests_for, try_all
from mutations import Mutant, draw, mutants_of, replacement

WANTED = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())
MISSED = ("survived", "timed out", "no test runs it")
PREFACE = """
A mutant is the source with one small change. What can be changed: the algorithms, the trainer's step with balancing,
metrics and scoring, the mini-batches, the engine, the optimizer, actor and critic, and what makes them from the
configuration (`scripts/mutants.toml` names the files). How: the operators of mutmut at every place that executes, and
besides them a condition forced to true or to false, neighbouring arguments swapped, and a call left out. Not changed:
annotations, imports, documentation, and the wording of error messages. Those to try are drawn evenly, by a fixed seed;
changes that a review once found unnoticed are always among them. A mutant is killed when a test that runs its line
fails. Those that time out are counted apart.
"""
WARM = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.testing", "tensordict",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "hypothesis", "hydra",
    "pydantic", "pyarrow.parquet", "rich.console", "ray", "matplotlib.figure", "pytest_timeout",
)  # fmt: skip


def all_mutants() -> tuple[int, list[Mutant]]:
    """How many mutants there are, and those that are tried: the named ones and those that were drawn."""
    generated = [mutant for entry in WANTED["source"] for file in sorted(ROOT.glob(entry["files"]))
                 if file.name != "__init__.py"
                 for mutant in mutants_of(ROOT, str(file.relative_to(ROOT)), entry.get("functions", ()))]  # fmt: skip
    named = [replacement(ROOT, entry["file"], entry["before"], entry["after"]) for entry in WANTED["named"]]
    return len(generated), [*named, *draw(generated, WANTED["number"], WANTED["seed"])]


def state_of_the_source() -> str:
    paths = sorted(path for part in ("verl_like", "tests") for path in (ROOT / part).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


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
    return f"Of {num_all} mutants {len(outcomes)} were tried: {parts}. {share_killed(outcomes):.1%} were killed."


def share_killed(outcomes: list[tuple[Mutant, str]]) -> float:
    """Of those that did not time out."""
    ended = [outcome for _, outcome in outcomes if outcome != "timed out"]
    return ended.count("killed") / len(ended)


class Results:
    """What came of each mutant, kept in a file until the source or a test changes, and printed unless it was killed."""

    def __init__(self, why: dict[tuple[str, str, str], str]) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self.file = WORK / f"{state_of_the_source()}.jsonl"
        self.why = why
        self.output = os.fdopen(os.dup(1), "w", buffering=1)  # a forked process has another standard output

    def note(self, mutant: Mutant, outcome: str) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps([name_of(mutant), outcome]) + "\n")
        if outcome != "killed" or mutant.key in self.why:
            print(f"{mutant.file}:{mutant.line}: {outcome}", *diff(mutant), sep="\n    ", file=self.output)

    def lines(self) -> list[list[str]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.is_file() else []

    def read(self) -> dict[str, str]:
        """The last outcome of each mutant."""
        return dict(self.lines())

    def survived_once(self) -> list[str]:
        """Those that were tried once and survived."""
        times = Counter(name for name, _ in self.lines())
        return [name for name, outcome in self.read().items() if outcome == "survived" and times[name] == 1]


def name_of(mutant: Mutant) -> str:
    return f"{mutant.line} {mutant.key}"


def try_those_left(mutants: dict[str, Mutant], results: Results) -> list[str]:
    """Tries the mutants of which there is no result yet; returns the tests that fail on the unchanged source."""

    def left() -> list[Mutant]:
        done = results.read()
        return [mutant for name, mutant in mutants.items() if name not in done]

    make_copies()
    known = baselines(state_of_the_source())
    seconds = {test: took for baseline in known.values() for test, took in baseline.seconds.items()}
    tests = {name: tests_for(mutant, known) for name, mutant in mutants.items()}
    for mutant in left():
        if not tests[name_of(mutant)]:
            results.note(mutant, "no test runs it")
    if left():
        run_template([(mutant, tests[name_of(mutant)]) for mutant in left()], seconds, results.note)
    anew = [(mutant, tests[name_of(mutant)]) for mutant in left()]
    try_all(anew, seconds, results.note, partial(start_anew, seconds))
    unexplained = [mutants[name] for name in results.survived_once() if mutants[name].key not in results.why]
    again = [(mutant, all_tests_for(mutant, known)) for mutant in unexplained]
    try_all(again, seconds, results.note, partial(start_anew, seconds))
    return [test for baseline in known.values() for test in baseline.failed]


def main() -> None:
    for module in WARM:
        importlib.import_module(module)
    num_all, drawn = all_mutants()
    mutants = {name_of(mutant): mutant for mutant in drawn}
    why = reasons()
    results = Results(why)
    print(f"{num_all} mutants, {len(mutants)} are tried.", flush=True)
    for file, before, after in why.keys() - {mutant.key for mutant in drawn}:
        print(f"scripts/survivors.toml names a mutant of {file} that is not tried: {before} -> {after}")
    failed = try_those_left(mutants, results)
    outcome_of = results.read()
    outcomes = [(mutant, outcome_of[name]) for name, mutant in mutants.items()]
    (ROOT / "docs" / "mutants.md").write_text(page(num_all, outcomes, why))
    print(summary(num_all, outcomes))
    missed = [mutant for mutant, outcome in outcomes if outcome != "killed"]
    unexplained = [f"{mutant.file}:{mutant.line}" for mutant in missed if mutant.key not in why]
    if failed:
        sys.exit(f"These tests fail on the unchanged source, so that no mutant was tried on them: {', '.join(failed)}")
    if unexplained:
        sys.exit(f"No reason in scripts/survivors.toml for {', '.join(unexplained)}")
    if share_killed(outcomes) < 0.95:
        sys.exit("Less than 95% were killed.")


if __name__ == "__main__":
    main()
