"""Runs what proves and takes long, the tests marked `proof`, in two processes: `make proofs`.

Prints one line a proof and writes them to docs/proofs.md, and the table of model families to
docs/models.md. `make proofs CHOSEN="-k resume"` runs those that these arguments of pytest choose
and leaves the rows of the others as they are. A test tells what it measured by
`record_property("result", ...)`, and what a fault did to a run by `record_property("reliability",
[...])`, the cells of a row of docs/reliability.md.
"""

import sys
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from scripts.commit import commit

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "proofs.md"
MODELS_PAGE = ROOT / "docs" / "models.md"
REPRESENTATIVES = tomllib.loads((ROOT / "tests" / "representatives.toml").read_text())
FAULTS_PAGE = ROOT / "docs" / "reliability.md"
FAULTS_HEAD = "|---|---|---|---|---|---|---|\n"
COLUMNS = ["what", "result", "took", "commit", "in `make test`"]


def sentence(test: str) -> str:
    """The name of a test as it reads."""
    return test.removeprefix("test_").replace("_", " ")


def representative(node_id: str) -> str:
    """The test of `make test` that stands for a proof."""
    file, test = node_id.split("[")[0].split("::")
    if test not in REPRESENTATIVES.get(file, {}):
        return "the same with other values"
    other_file, other_test = REPRESENTATIVES[file][test].split("::")
    return f"{sentence(other_test)} (`{other_file}`)"


class Report:
    """A pytest plugin: a line for each proof as soon as it has run."""

    def __init__(self, commit: str) -> None:
        self.commit = commit
        self.rows: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.families: str | None = None
        """The table of docs/models.md, where its proof has run."""
        self.faults: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            what = sentence(report.nodeid.split("::", 1)[1])
            properties = dict(report.user_properties)
            result = properties.get("result", "holds")
            self.families = properties.get("families", self.families)
            if report.outcome != "passed":
                result = f"{report.outcome}: {report.longreprtext.strip().splitlines()[-1]}"
            seconds = self.seconds[report.nodeid]
            faults = [cells for name, cells in report.user_properties if name == "reliability"]
            self.faults += [f"| {' | '.join(cells)} |" for cells in faults]
            cells = [what, result, f"{seconds:.0f} s", self.commit, representative(report.nodeid)]
            self.rows[what] = f"| {' | '.join(cells)} |".replace("\n", " ")
            print(f"\n{seconds:5.0f} s  {what}: {result}", flush=True)


def main() -> int:
    chosen = sys.argv[1:]
    report = Report(commit())
    options = [
        "-m",
        "proof",
        "-q",
        "-p",
        "no:cacheprovider",
        "--session-timeout=21600",
        "-n",
        "2",
        "--dist",
        "loadfile",
    ]
    code = pytest.main([*options, *(chosen or [str(ROOT / "tests")])], plugins=[report])
    earlier = (
        [line for line in PAGE.read_text().splitlines() if line.endswith(" |")][1:]
        if chosen
        else []
    )
    rows = {row.removeprefix("| ").split(" | ")[0]: row for row in earlier} | report.rows
    about = (
        "What proves and takes long, as `make proofs` ran it, each on its commit. The last column "
        "is the test of `make test` that stands for it."
    )
    head = f"# Proofs\n\n{about} Last run: {date.today()}.\n\n"
    header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    table = "\n".join([*header, *sorted(rows.values())])
    PAGE.write_text(f"{head}{table}\n")
    if report.families:
        write_families(report.families, report.commit)
    write_faults(report.faults, keep=bool(chosen))
    return code


def write_families(table: str, commit: str) -> None:
    """Puts the table of model families into docs/models.md, between its marks."""
    before, _, rest = MODELS_PAGE.read_text().partition("<!-- families -->")
    _, _, after = rest.partition("<!-- end of families -->")
    marked = f"<!-- families -->\n\nOn {commit}:\n\n{table}\n\n<!-- end of families -->"
    MODELS_PAGE.write_text(f"{before}{marked}{after}")


def write_faults(rows: list[str], keep: bool) -> None:
    """Writes the rows of docs/reliability.md below its text; with `keep` those of faults that did
    not run stay."""
    text, header, table = FAULTS_PAGE.read_text().partition(FAULTS_HEAD)
    assert header, f"{FAULTS_PAGE} has lost its table"
    faults = {fault_of(row): row for row in [*(table.splitlines() if keep else []), *rows]}
    FAULTS_PAGE.write_text(
        text + header + "\n".join(faults[fault] for fault in sorted(faults)) + "\n"
    )


def fault_of(row: str) -> tuple[int, str, str]:
    """Number, what was done, and the kind of run."""
    number, done, kind = row.removeprefix("| ").split(" | ")[:3]
    return int(number), done, kind


if __name__ == "__main__":
    sys.exit(main())
