"""Measures how dense Python code is: `python scripts/plain.py FOLDER...` prints one row a folder.

| column | meaning |
|---|---|
| tokens | tokens of code, without comments, docstrings and layout |
| code lines | lines that have at least one such token |
| a line | tokens divided by code lines |
| a statement | tokens divided by statements, docstrings not counted |
| >100 % | share of all lines that have more than 100 columns |
| packed | assignments of a tuple to a tuple, in 1,000 code lines |
| nested | comprehensions with two `for`, or with another one inside, in 1,000 code lines |
| chained | conditional expressions with another one as a branch, in 1,000 code lines |
| zip | assignments of `zip(...)` to a tuple of names, in 1,000 code lines |
| := | `:=` outside the condition of an `if` or `while` statement, in 1,000 code lines |
| of % | share of docstrings that begin with "Of", "Whether", "Those" or "As" |
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
HEADLESS = ("Of ", "Whether ", "Those ", "As ")
WIDTH = 100
PER_THOUSAND_LINES = ("packed", "nested", "chained", "zip", ":=")


def measure(sources: list[str]) -> dict[str, float]:
    """The columns of the table for these files; zeros if there is none."""
    found: Counter[str] = Counter()
    for source in sources:
        tree = ast.parse(source)
        docstrings = list(docstrings_of(tree))
        found += tokens_and_lines(source, docstrings)
        found += constructs(tree)
        found["docstrings"] += len(docstrings)
        found["headless"] += sum(text_of(node).startswith(HEADLESS) for node in docstrings)
        found["statements"] -= len(docstrings)
    code_lines = max(1, found["code lines"])
    row: dict[str, float] = {"tokens": found["tokens"], "code lines": found["code lines"]}
    row["a line"] = found["tokens"] / code_lines
    row["a statement"] = found["tokens"] / max(1, found["statements"])
    row[">100 %"] = 100 * found["wide"] / max(1, found["lines"])
    row |= {name: 1000 * found[name] / code_lines for name in PER_THOUSAND_LINES}
    row["of %"] = 100 * found["headless"] / max(1, found["docstrings"])
    return row


def docstrings_of(tree: ast.Module) -> Iterator[ast.Expr]:
    """Every text that stands as a statement of its own, below a field as well."""
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield node


def text_of(docstring: ast.Expr) -> str:
    assert isinstance(docstring.value, ast.Constant)
    return str(docstring.value.value).strip()


def tokens_and_lines(source: str, docstrings: list[ast.Expr]) -> Counter[str]:
    in_docstring: set[int] = set()
    for node in docstrings:
        in_docstring.update(lines_of(node))
    num_tokens = 0
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in in_docstring:
            num_tokens += 1
            code_lines.update(range(token.start[0], token.end[0] + 1))
    lines = source.splitlines()
    wide = [line for line in lines if len(line) > WIDTH]
    return Counter(
        {
            "tokens": num_tokens,
            "code lines": len(code_lines),
            "lines": len(lines),
            "wide": len(wide),
        }
    )


def lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def constructs(tree: ast.Module) -> Counter[str]:
    found: Counter[str] = Counter()
    conditions = {
        id(node.test.left if isinstance(node.test, ast.Compare) else node.test)
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.While)
    }
    for node in ast.walk(tree):
        found["statements"] += isinstance(node, ast.stmt)
        found["packed"] += assigns_to_tuple(node, ast.Tuple)
        found["zip"] += assigns_to_tuple(node, ast.Call) and is_call_of_zip(node)
        found["nested"] += isinstance(node, COMPREHENSIONS) and is_nested(node)
        found["chained"] += isinstance(node, ast.IfExp) and is_chained(node)
        found[":="] += isinstance(node, ast.NamedExpr) and id(node) not in conditions
    return found


def assigns_to_tuple(node: ast.AST, kind: type[ast.expr]) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, kind)


def is_call_of_zip(node: ast.AST) -> bool:
    assert isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    return isinstance(node.value.func, ast.Name) and node.value.func.id == "zip"


def is_nested(node: ast.AST) -> bool:
    assert isinstance(node, COMPREHENSIONS)
    inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
    return len(node.generators) > 1 or len(inner) > 1


def is_chained(node: ast.IfExp) -> bool:
    return any(isinstance(branch, ast.IfExp) for branch in (node.body, node.orelse))


def sources_in(folder: Path) -> list[str]:
    """The Python files of a folder, or the one file that it is."""
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    return [file.read_text() for file in files]


def main() -> None:
    folders = sys.argv[1:] or ["verl_like"]
    rows = {folder: measure(sources_in(Path(folder))) for folder in folders}
    names = list(rows[folders[0]])
    print(f"{'folder':40}" + "".join(f"{name:>12}" for name in names))
    for folder, row in rows.items():
        cells = [f"{value:12.1f}" if value % 1 else f"{value:12.0f}" for value in row.values()]
        print(f"{folder[-40:]:40}" + "".join(cells))


if __name__ == "__main__":
    main()
