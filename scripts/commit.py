"""Which commit a result is of."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ("docs", "benchmarks/results")
"""What commands write that measure or prove; it does not change what they run."""


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out, with `-dirty` if other files than those in `WRITTEN` differ
    from it."""

    def said_by_git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    others = [f":(exclude){path}" for path in WRITTEN]
    changed = said_by_git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    name = said_by_git("rev-parse", "--short", "HEAD")
    return f"{name}-dirty" if changed else name
