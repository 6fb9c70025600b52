"""Runs what proves and takes long, the tests marked `proof`, one after the other: `make proofs`.

Prints one line a proof and writes them to docs/proofs.md. A test tells what it measured by
`record_property("result", ...)`.
"""

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Report:
    """A pytest plugin: a line for each proof as soon as it has run."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.seconds = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            what = report.nodeid.split("::", 1)[1].removeprefix("test_").replace("_", " ")
            result = dict(report.user_properties).get("result", "holds")
            if report.outcome != "passed":
                result = f"{report.outcome}: {report.longreprtext.strip().splitlines()[-1]}"
            self.rows.append(f"| {what} | {result} | {self.seconds:.0f} s |".replace("\n", " "))
            print(f"\n{self.seconds:5.0f} s  {what}: {result}", flush=True)
            self.seconds = 0.0


def main() -> int:
    report = Report()
    code = pytest.main(
        ["-m", "proof", "-q", "-p", "no:cacheprovider", "--session-timeout=5000", str(ROOT / "tests")], plugins=[report]
    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    head = f"# Proofs\n\nWhat proves and takes long, as `make proofs` ran it on {date.today()}, commit {commit}.\n\n"
    table = "\n".join(["| what | result | took |", "|---|---|---|", *report.rows])
    (ROOT / "docs" / "proofs.md").write_text(f"{head}{table}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
