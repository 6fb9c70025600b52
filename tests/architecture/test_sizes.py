"""Budgets that keep the package readable; each failure says what to do."""

import ast

from source_tree import PACKAGE, ROOT, parse, python_files, relative

WALK_FROM_MAIN_TO_LOSS = [
    "verl_like/trainer/main_ppo.py",
    "verl_like/trainer/run_ppo.py",
    "verl_like/trainer/ppo_trainer.py",
    "verl_like/trainer/learner.py",
    "verl_like/workers/actor.py",
    "verl_like/workers/engine/mini_batches.py",
    "verl_like/algorithms/policy_losses/vanilla.py",
]


def function_lengths(tree: ast.Module) -> dict[str, int]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f"{function.name}:{function.lineno}": function.end_lineno - function.lineno + 1 for function in functions}


def test_function_lengths_are_counted_from_def_to_last_line():
    assert function_lengths(ast.parse("def f():\n    a = 1\n    return a\n")) == {"f:1": 3}


def test_no_file_is_longer_than_500_lines():
    folders = (PACKAGE, ROOT / "tests", ROOT / "examples", ROOT / "scripts")
    long = {relative(p): n for p in python_files(*folders) if (n := len(p.read_text().splitlines())) > 500}
    assert not long, f"split these files by idea: {long}"


def test_no_function_is_longer_than_80_lines():
    long = {
        f"{relative(path)}::{name}": length
        for path in python_files()
        for name, length in function_lengths(parse(path)).items()
        if length > 80
    }
    assert not long, f"give the phases of these functions names of their own: {long}"


def test_the_step_fits_on_one_screen():
    lengths = function_lengths(parse(PACKAGE / "trainer/ppo_trainer.py"))
    for name in ("step", "fit"):
        assert next(length for key, length in lengths.items() if key.startswith(f"{name}:")) <= 80


def test_the_walk_from_main_to_the_loss_is_short():
    assert len(WALK_FROM_MAIN_TO_LOSS) <= 8
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in WALK_FROM_MAIN_TO_LOSS}
    assert sum(lines.values()) <= 1500, f"the walk is the reading path of a newcomer; shorten it: {lines}"


def test_the_walk_is_connected_by_imports_or_role_names():
    """Each file of the walk imports the next one, but for the workers, which the trainer reaches by their methods."""
    main, run, trainer, learner, worker, mini_batches, loss = (
        (ROOT / name).read_text() for name in WALK_FROM_MAIN_TO_LOSS
    )
    assert "from verl_like.trainer.run_ppo import" in main
    assert "from verl_like.trainer.ppo_trainer import" in run
    assert "from verl_like.trainer.learner import" in trainer and "self.learner.learn(" in trainer
    assert "def learn(" in learner and "update_actor" in learner and "def update_actor" in worker
    assert "from verl_like.workers.engine.mini_batches import" in worker and "def update(" in mini_batches
    assert "from verl_like.algorithms.policy_losses import" in worker and "@register_policy_loss" in loss
