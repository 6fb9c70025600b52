"""docs/trouble.md has every exception class of the library, and messages as the source has them."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trouble.md").read_text()
SOURCE = {path: path.read_text() for path in (ROOT / "verl_like").rglob("*.py")}
BUILT_IN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def exception_classes() -> set[str]:
    """Names of the classes of the library that derive from an exception."""
    bases_of: dict[str, set[str]] = {}
    for text in SOURCE.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases_of[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
    found: set[str] = set()
    grows = True
    while grows:
        derived = {name for name, bases in bases_of.items() if bases & (BUILT_IN | found)}
        grows = not derived <= found
        found |= derived
    return found


def rows_of(heading: str) -> list[str]:
    """The first cells of the table below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def test_a_class_that_derives_from_an_error_of_the_library_is_found():
    assert {"ConfigError", "WorkerStopped", "StaleWeightsError"} <= exception_classes()
    assert "WorkerGroup" not in exception_classes()


def test_every_exception_class_of_the_library_is_on_the_page():
    assert set(rows_of("Errors by name")) == exception_classes()


@pytest.mark.parametrize("message", rows_of("Messages of the start and the end"))
def test_a_message_of_the_page_is_in_the_source(message: str):
    """Word for word, whatever stands for `...` in it and wherever the source breaks its lines."""
    source = re.sub(r'"\s*f?"', "", "\n".join(SOURCE.values()))
    parts = [part.strip(" :.(),;?") for part in re.split(r"\.\.\.|No space.*", message)]
    for part in parts:
        words = re.escape(part)
        assert re.search(words, source), part
