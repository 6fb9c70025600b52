"""Imports point down only, and nothing of ours is imported inside a function."""

import ast

from source_tree import PACKAGE, parse, python_files, relative

LAYER = {
    "config_model": 0,
    "protocol": 0,
    "single_controller": 1,
    "algorithms": 1,
    "rewards": 1,
    "data": 1,
    "workers": 2,
    "trainer": 3,
}
# Optional packages, each imported inside a function of the files that wrap it.
OPTIONAL = {
    "vllm": {"workers/rollout/vllm_engine.py"},
    "flash_attn": {"workers/models/attention.py"},
    "wandb": {"trainer/tracking.py"},
    "trackio": {"trainer/tracking.py"},
    "mlflow": {"trainer/tracking.py"},
    "torch.utils.tensorboard": {"trainer/tracking.py"},
}


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import; write verl_like...."
        return [node.module or ""]
    return []


def layer_violations(package_path: str, module: str) -> str | None:
    """Why a file of the package may not import `module`, or None. `package_path` is relative to the package."""
    parts = module.split(".")
    if parts[0] != "verl_like" or len(parts) < 2 or "/" not in package_path:
        return None
    source, target = package_path.split("/")[0], parts[1]
    if target == source or LAYER[target] < LAYER[source]:
        return None
    return f"{package_path} imports {module}: {source} (L{LAYER[source]}) may only import lower layers; move it down"


def test_the_rule_itself_sees_an_upward_and_a_sibling_import():
    assert layer_violations("workers/actor.py", "verl_like.trainer.metrics")
    assert layer_violations("rewards/gsm8k.py", "verl_like.data.sampler")
    assert not layer_violations("workers/actor.py", "verl_like.protocol")


def test_imports_point_down_only():
    violations = [
        violation
        for path in python_files()
        for node in ast.walk(parse(path))
        for module in imported_modules(node)
        if (violation := layer_violations(str(path.relative_to(PACKAGE)), module))
    ]
    assert not violations, "\n".join(violations)


def test_only_optional_engines_are_imported_inside_a_function():
    violations = []
    for path in python_files():
        for function in ast.walk(parse(path)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                for module in imported_modules(node):
                    allowed = [name for name in OPTIONAL if module == name or module.startswith(f"{name}.")]
                    if not any(str(path.relative_to(PACKAGE)) in OPTIONAL[name] for name in allowed):
                        violations.append(
                            f"{relative(path)}:{node.lineno} {function.name} imports {module}: move it up"
                        )
    assert not violations, "\n".join(violations)


def test_there_is_no_utils_package():
    assert not [relative(path) for path in PACKAGE.rglob("*util*")]
