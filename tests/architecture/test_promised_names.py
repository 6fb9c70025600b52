"""What the documents promise to code of users is there: tests/promised_names.toml is the list."""

import ast
import importlib
import re
import tomllib
from functools import reduce

import pytest
from source_tree import PACKAGE, ROOT, python_files
from test_docs import DOCUMENTS

from verl_like.plugins import MOVED

LISTED = tomllib.loads((ROOT / "tests" / "promised_names.toml").read_text())
MODULES: dict[str, list[str]] = LISTED["modules"]
METHODS: dict[str, list[str]] = LISTED["methods"]
REMOVED: dict[str, str] = LISTED["removed"]
PROMISED = [
    f"{place}.{name}" for place, names in [*MODULES.items(), *METHODS.items()] for name in names
]
WRITTEN_BY_COMMANDS = [
    "gpu_rehearsal.md",
    "memory_plan.md",
    "mutants.md",
    "performance.md",
    "proofs.md",
    "same_numbers.md",
]
ABOUT_THE_INSIDE = ["forms.md", "glossary.md"]


def find(name: str) -> object:
    """What a dotted name stands for: of a module, a class, or its attribute. AttributeError if it
    is not there."""
    parts = name.split(".")
    lengths = [length for length in range(1, len(parts) + 1) if _is_module(parts[:length])]
    module = importlib.import_module(".".join(parts[: max(lengths)]))
    return reduce(getattr, parts[max(lengths) :], module)


def _is_module(parts: list[str]) -> bool:
    path = ROOT.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("name", [name for name in PROMISED if name not in REMOVED])
def test_a_promised_name_is_there(name: str):
    try:
        find(name)
    except AttributeError:
        pytest.fail(
            f"{name} is promised: keep it, or add it to [removed] of tests/promised_names.toml"
        )


@pytest.mark.parametrize("name", LISTED["programs"]["names"])
def test_a_promised_program_can_be_run(name: str):
    path = ROOT.joinpath(*name.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert '\nif __name__ == "__main__":\n' in file.read_text()


def test_what_was_removed_is_gone_and_has_a_replacement():
    for name, replacement in REMOVED.items():
        assert replacement, f"{name}: say what replaces it"
        if not name.startswith("key:"):
            assert name in PROMISED, f"{name} was never promised"
            with pytest.raises(AttributeError):
                find(name)


def test_a_module_that_has_moved_is_promised_where_it_is_now_alone():
    for before, now in MOVED.items():
        assert now in MODULES and before not in MODULES
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(before)


def test_every_class_and_path_that_the_documents_name_is_listed():
    """A name in quotes that is a class of the package, and a dotted path of it."""
    classes = {
        name
        for file in python_files(PACKAGE)
        for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.M)
    }
    listed = {part for name in PROMISED for part in name.split(".")}
    missing = []
    for document in DOCUMENTS:
        if document.name in [*WRITTEN_BY_COMMANDS, *ABOUT_THE_INSIDE]:
            continue
        for quoted in re.findall(r"`([^`\n]+)`", document.read_text()):
            named = {name for name in re.findall(r"\b[A-Z]\w+\b", quoted) if name in classes}
            missing += [f"{document.name}: {name}" for name in named - listed]
            for path in re.findall(r"\bverl_like(?:\.\w+)+", quoted):
                is_listed = (
                    path in PROMISED or path in MODULES or path in LISTED["programs"]["names"]
                )
                missing += [] if is_listed or path in METHODS else [f"{document.name}: {path}"]
    assert not missing, "add to tests/promised_names.toml:\n" + "\n".join(sorted(set(missing)))


def test_every_program_of_the_documents_is_listed():
    """Those of the repository; another package's, such as vLLM's server, are its own."""
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"python3? -m ((?:\w+\.)+\w+)", document.read_text())
        if (ROOT / name.partition(".")[0]).is_dir()
    }
    assert named <= set(LISTED["programs"]["names"])


def test_every_import_in_the_documents_is_promised():
    missing = []
    for document in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.S):
            imports = [
                node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)
            ]
            names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
            own = [name for name in names if name.startswith("verl_like.")]
            missing += [f"{document.name}: {name}" for name in own if name not in PROMISED]
    assert not missing, missing
