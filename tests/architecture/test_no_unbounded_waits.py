"""Nothing waits for ever: every wait of Ray has a timeout."""

import ast

from source_tree import PACKAGE, ROOT, parse, python_files, relative

WAITS = {"ray.get", "ray.wait"}


def unbounded_waits(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines of ray.get and ray.wait without a timeout, and of their names imported bare, which
    would hide them.

    A placement group's `.wait()` has a timeout in its first argument; a bare one is reported.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            found += [
                (node.lineno, f"from ray import {a.name}")
                for a in node.names
                if f"ray.{a.name}" in WAITS
            ]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        timeout = next(
            (
                keyword.value
                for keyword in node.keywords
                if keyword.arg in ("timeout", "timeout_seconds")
            ),
            None,
        )
        bounded = timeout is not None and not (
            isinstance(timeout, ast.Constant) and timeout.value is None
        )
        if (name in WAITS and not bounded) or (
            name.endswith(".wait") and name not in WAITS and not node.args and not bounded
        ):
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_the_rule_itself_sees_unbounded_waits():
    source = (
        "from ray import get\nray.get(x)\nray.wait(x, timeout=None)\nray.get(x, "
        "timeout=3)\npg.wait()\npg.wait(3)"
    )
    assert [line for line, _ in unbounded_waits(ast.parse(source))] == [1, 2, 3, 5]


def test_every_wait_has_a_timeout():
    violations = [
        f"{relative(path)}:{line} {call}"
        for path in python_files(PACKAGE, ROOT / "examples")
        for line, call in unbounded_waits(parse(path))
    ]
    assert not violations, "give each wait a deadline:\n" + "\n".join(violations)
