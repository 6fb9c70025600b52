"""The package's files and their syntax trees, for the architecture tests."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl_like"


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders or (PACKAGE,) for path in folder.rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))
