"""Which commit a result is said to be of."""

import subprocess
from pathlib import Path

from scripts.commit import commit


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_what_a_proof_or_a_benchmark_writes_does_not_change_the_commit_and_other_files_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    files = [
        tmp_path / name
        for name in ("docs/proofs.md", "benchmarks/results/calls.json", "benchmarks/calls.py")
    ]
    for file in files:
        file.write_text("before")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    name = git(tmp_path, "rev-parse", "--short", "HEAD")
    for file in files[:2]:
        file.write_text("after")
    (tmp_path / "log.txt").write_text("of nobody's")
    assert commit(tmp_path) == name
    files[2].write_text("after")
    assert commit(tmp_path) == f"{name}-dirty"
