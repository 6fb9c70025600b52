"""Budgets that keep the package readable; each failure says what to do."""

import ast
from functools import cache
from pathlib import Path

from source_tree import PACKAGE, ROOT, parse, python_files, relative

from verl_like.workers.config.roles import PolicyLossConfig

# From the entry point to the engine: each file calls the next by this name.
WALK = ("run_ppo", "get_trainer", "Learner", "update_actor", "update", "on_device")
LOOP = PACKAGE / "trainer/loop/training_loop.py"
"""From which the trainer has its `fit` and `step`."""


def function_lengths(tree: ast.Module) -> dict[str, int]:
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {
        f"{function.name}:{function.lineno}": function.end_lineno - function.lineno + 1
        for function in functions
    }


def test_function_lengths_are_counted_from_def_to_last_line():
    assert function_lengths(ast.parse("def f():\n    a = 1\n    return a\n")) == {"f:1": 3}


def test_no_function_is_longer_than_80_lines():
    long = {
        f"{relative(path)}::{name}": length
        for path in python_files()
        for name, length in function_lengths(parse(path)).items()
        if length > 80
    }
    assert not long, f"give the phases of these functions names of their own: {long}"


def test_the_step_fits_on_one_screen():
    for file, name in (
        ("ppo/ray_trainer.py", "take"),
        ("loop/training_loop.py", "step"),
        ("loop/training_loop.py", "fit"),
    ):
        lengths = function_lengths(parse(PACKAGE / "trainer" / file))
        assert next(length for key, length in lengths.items() if key.startswith(f"{name}:")) <= 60


def defines(tree: ast.Module, method: str) -> bool:
    """Whether a class of the file has the method, with more than the docstring that a protocol
    has."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    methods = [
        node
        for c in classes
        for node in c.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    return any(
        not isinstance(statement, ast.Expr) for method in methods for statement in method.body
    )


def next_file(file: Path, name: str) -> Path:
    """Where what a file calls by `name` is: the module that it imports it from, or the file that
    has the method."""
    nodes = list(ast.walk(parse(file)))
    called = {
        ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)
    }
    # A worker's method is not called but given to a function that submits the call.
    used = called | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert name in used, f"{relative(file)} does not call {name}"
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return (ROOT / node.module.replace(".", "/")).with_suffix(".py")
    (found,) = [path for path in python_files() if defines(parse(path), name)]
    return found


@cache
def walk_from_main_to_loss() -> list[Path]:
    files = [PACKAGE / "trainer/main_ppo.py"]
    for name in WALK:
        files.append(next_file(files[-1], name))
    actor = next(file for file in files if defines(parse(file), "update_actor"))
    # A package: a file for each loss
    losses = next_file(actor, "get_policy_loss_fn").with_suffix("")
    assert "import TrainingLoop\n" in (PACKAGE / "trainer/ppo/ray_trainer.py").read_text()
    return [*files, LOOP, losses / f"{PolicyLossConfig.model_fields['loss_mode'].default}.py"]


def test_the_walk_follows_imports_and_method_names():
    assert {path.stem for path in walk_from_main_to_loss()} >= {
        "ray_trainer",
        "learner",
        "fsdp",
        "vanilla",
    }


def test_the_walk_from_main_to_the_loss_is_short():
    files = sorted({relative(path) for path in walk_from_main_to_loss()})
    assert len(files) <= 9, f"the walk is the reading path of a newcomer; shorten it: {files}"
