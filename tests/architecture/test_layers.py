"""Imports point down only, and nothing of ours is imported inside a function."""

import ast
import graphlib
from pathlib import Path

import pytest
from source_tree import PACKAGE, parse, python_files, relative

from verl_like.workers.engine.base import TrainingEngine

LAYER = {
    "claims": 0,
    "config_model": 0,
    "files": 0,
    "plugins": 0,
    "registry": 0,
    "secret_values": 0,
    "protocol": 0,
    "single_controller": 1,
    "algorithms": 1,
    "rewards": 1,
    "data": 1,
    "workers": 2,
    "trainer": 3,
    "rehearse": 4,
    "compare": 4,
    "episodes": 4,
    "export": 4,
    "train": 4,
    "compat": 5,
}
# Optional packages, each imported inside a function of the files that wrap it.
OPTIONAL = {
    "vllm": {
        *("workers/rollout/vllm_engine.py", "workers/rollout/vllm_async_engine.py"),
        *("workers/weights/nccl.py", "workers/weights/ipc.py", "rehearse/engine_process.py"),
        *("workers/agents/chat.py", "workers/agents/engine_client.py"),
        "workers/agents/endpoint.py",
    },
    "uvicorn": {"workers/agents/endpoint.py"},  # vLLM needs it and starlette
    "starlette": {"workers/agents/endpoint.py"},
    "triton": {"rehearse/engine_process.py"},
    "peft": {"workers/models/lora.py"},
    "flash_attn": {"workers/models/attention.py"},
    # Imports Triton
    "verl_like.workers.models.head_kernels": {"workers/models/linear_log_prob.py"},
    "wandb": {"trainer/run/tracking.py"},
    "trackio": {"trainer/run/tracking.py"},
    "mlflow": {"trainer/run/tracking.py"},
    "torch.utils.tensorboard": {"trainer/run/tracking.py"},
}


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import; write verl_like...."
        return [node.module or ""]
    return []


def layer_violations(package_path: str, module: str) -> str | None:
    """Why a file of the package may not import `module`, or None. `package_path` is relative to the
    package."""
    parts = module.split(".")
    if parts[0] != "verl_like" or len(parts) < 2 or "/" not in package_path:
        return None
    source, target = package_path.split("/")[0], parts[1]
    if target == source or LAYER[target] < LAYER[source]:
        return None
    return (
        f"{package_path} imports {module}: {source} (L{LAYER[source]}) may only import lower "
        "layers; move it down"
    )


def test_the_rule_itself_sees_an_upward_and_a_sibling_import():
    assert layer_violations("workers/actor.py", "verl_like.trainer.ppo.metrics")
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


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, of modules by name with their source; TYPE_CHECKING
    makes no difference."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        names = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= submodules & sources.keys() or {node.module or ""}
        graph[module] = names & sources.keys()
    return graph


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def test_the_rule_itself_sees_a_circle_behind_type_checking():
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a"
    graph = import_graph({"p": "", "p.a": "from p.b import f", "p.b": hidden})
    assert graph == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.a"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def test_no_files_import_each_other_in_a_circle():
    """graphlib names the files of the circle: move what both need into a file of its own."""
    graph = import_graph({module_name(p): p.read_text() for p in python_files()})
    graphlib.TopologicalSorter(graph).prepare()


def test_only_optional_engines_are_imported_inside_a_function():
    violations = []
    for path in python_files():
        for function in ast.walk(parse(path)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                for module in imported_modules(node):
                    allowed = [
                        name for name in OPTIONAL if module == name or module.startswith(f"{name}.")
                    ]
                    if not any(
                        str(path.relative_to(PACKAGE)) in OPTIONAL[name] for name in allowed
                    ):
                        violations.append(
                            f"{relative(path)}:{node.lineno} {function.name} imports {module}: "
                            "move it up"
                        )
    assert not violations, "\n".join(violations)


# Parts of the workers, each of which imports those below; all other files are roles.
ROOMS = {
    **{"config": 0, "pinned_memory": 0, "weights": 1},
    **{"models": 1, "planning": 2, "engine": 3, "rollout": 3},
    **{"agents": 4, "roles": 5},
}


def room(module: str) -> str:
    name = module.split(".")[2]
    return name if name in ROOMS else "roles"


def test_rooms_of_the_workers_import_those_below_and_the_trainer_no_engine():
    graph = import_graph({module_name(path): path.read_text() for path in python_files()})
    used = [(a, b) for a in graph for b in graph[a] if b.startswith("verl_like.workers.")]
    reached = [
        (a, b) for a, b in used if a.startswith("verl_like.trainer.") and room(b) == "engine"
    ]
    inside = [(a, b) for a, b in used if a.startswith("verl_like.workers.") and room(a) != room(b)]
    upward = [(a, b) for a, b in inside if ROOMS[room(b)] >= ROOMS[room(a)]]
    assert inside and not upward + reached, upward + reached


# Packages of the trainer, each of which imports those with a smaller number; the entry points stand
# above all.
PACKAGES = {
    **{"config": 0, "state": 1, "memory": 1, "run": 2, "loop": 2},
    **{"ppo": 3, "supervised": 3, "detached": 4, "entry points": 5},
}


def trainer_package(module: str) -> str:
    name = module.split(".")[2]
    return "entry points" if name.startswith("main_") else name


def test_packages_of_the_trainer_import_those_below():
    graph = import_graph({module_name(path): path.read_text() for path in python_files()})
    trainer = "verl_like.trainer."
    used = [
        (a, b) for a in graph for b in graph[a] if a.startswith(trainer) and b.startswith(trainer)
    ]
    between = [(a, b) for a, b in used if trainer_package(a) != trainer_package(b)]
    upward = [
        (a, b) for a, b in between if PACKAGES[trainer_package(b)] >= PACKAGES[trainer_package(a)]
    ]
    assert between and not upward, upward


def test_roles_use_nothing_of_their_engine_but_the_protocol():
    files = [
        *(PACKAGE / "workers").glob("*.py"),
        *(PACKAGE / f"workers/engine/{n}.py" for n in ("mini_batches", "throughput")),
    ]
    attributes = [
        node for path in files for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)
    ]
    used = {
        node.attr for node in attributes if ast.unparse(node.value) in ("engine", "self.engine")
    }
    known = vars(TrainingEngine).keys() | TrainingEngine.__annotations__.keys()
    assert used and not used - known, (
        f"put these into TrainingEngine, or keep them in the engine: {used - known}"
    )


def test_there_is_no_utils_package():
    assert not [relative(path) for path in PACKAGE.rglob("*util*")]
