"""Names of CUDA's builds of torch and vLLM that the source uses: `python scripts/null_gpu/names.py
[--write]`.

`make gpu-rehearsal` runs it with the Python of the GPU environment: each name has to exist there,
and each call to fit its signature. `--write` writes names and parameters to `names.json`, with
which `make test` compares the source.
"""

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = Path(__file__).with_name("names.json")
PACKAGES = ("vllm", "torch.cuda", "torch.distributed", "torch.nn.attention")
NOT_ON_GPUS = ("vllm.v1.attention.backends.cpu_attn.",)
"""Names that the source reads on a CPU alone."""
KINDS = {
    "a": inspect.Parameter.POSITIONAL_ONLY,
    "b": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "*": inspect.Parameter.VAR_POSITIONAL,
    "k": inspect.Parameter.KEYWORD_ONLY,
    "**": inspect.Parameter.VAR_KEYWORD,
}
"""By their sign in the list."""
SIGNS = {kind: sign for sign, kind in KINDS.items()}
Parameters = list[list[str]]
"""Of each parameter its name, the sign of its kind, and "=" where it has a default."""


@dataclass(frozen=True)
class Use:
    """A place in the source that uses a name. call: the expression, where the name is called."""

    name: str
    place: str
    call: ast.Call | None


def uses_in(source: str, file: str) -> Iterator[Use]:
    """Those of `PACKAGES` in the text of a file."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    found: list[tuple[str, ast.stmt | ast.expr, ast.Call | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                imported[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.append((f"{node.module}.{alias.name}", node, None))
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            name = _dotted(node, imported)
            if name:
                found.append((name, node, called.get(id(node))))
    for name, node, call in found:
        is_of_interest = any(name.startswith(f"{package}.") for package in PACKAGES)
        if is_of_interest and not name.startswith(NOT_ON_GPUS):
            yield Use(name, f"{file}:{node.lineno}", call)


def _dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    """The full name that an expression such as `dist.all_reduce` stands for."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, imported)
        return f"{owner}.{node.attr}" if owner else None
    return None


def uses_of_source() -> list[Use]:
    """Those in all files of the package."""
    uses: list[Use] = []
    for path in sorted((ROOT / "verl_like").rglob("*.py")):
        uses += uses_in(path.read_text(), str(path.relative_to(ROOT)))
    return uses


def resolve(name: str) -> Any:
    """What a name stands for; AttributeError or ImportError where it does not exist."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


def parameters_of(found: Any) -> Parameters | None:
    """None where it is not called, or where Python cannot say how."""
    if not callable(found):
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    return [
        [each.name, SIGNS[each.kind], "" if each.default is inspect.Parameter.empty else "="]
        for each in signature.parameters.values()
    ]


def fault_of_call(call: ast.Call, parameters: Parameters) -> str | None:
    """Why a call does not fit the parameters."""
    signature = inspect.Signature(
        [
            inspect.Parameter(
                name, KINDS[sign], default=None if default else inspect.Parameter.empty
            )
            for name, sign, default in parameters
        ]
    )
    positional = [None for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    is_whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    bind = signature.bind if is_whole else signature.bind_partial
    try:
        bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def faults_of(uses: list[Use], known: dict[str, Parameters | None]) -> list[str]:
    """What of the source does not go with these names."""
    faults = []
    for use in uses:
        if use.name not in known:
            faults.append(f"{use.place}: {use.name} does not exist")
            continue
        parameters = known[use.name]
        fault = fault_of_call(use.call, parameters) if use.call and parameters is not None else None
        if fault:
            faults.append(f"{use.place}: the call of {use.name} does not fit, {fault}")
    return faults


def resolve_all(names: set[str]) -> dict[str, Parameters | None]:
    """Those that exist in this environment, with their parameters."""
    known: dict[str, Parameters | None] = {}
    for name in sorted(names):
        try:
            found = resolve(name)
        except (AttributeError, ImportError):
            continue
        known[name] = parameters_of(found)
    return known


def main(arguments: list[str]) -> int:
    uses = uses_of_source()
    known = resolve_all({use.name for use in uses})
    faults = faults_of(uses, known)
    if "--write" in arguments:
        lines = [
            f"{json.dumps(name)}: {json.dumps(parameters)}" for name, parameters in known.items()
        ]
        COMMITTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif known != json.loads(COMMITTED.read_text()):
        faults.append(
            f"{COMMITTED.name} is not what this environment has: run this again with --write"
        )
    print(
        "\n".join(faults)
        or f"All {len(known)} names of torch and vLLM exist, and the calls fit them."
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
