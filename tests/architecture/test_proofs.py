"""Every proof has a representative among the tests of `make test`: tests/representatives.toml names
it."""

import ast
import tomllib

from source_tree import ROOT, parse, python_files, relative

REPRESENTATIVES = tomllib.loads((ROOT / "tests" / "representatives.toml").read_text())


def is_proof(node: ast.expr) -> bool:
    """Whether it is `pytest.mark.proof`, or a list that has it."""
    if isinstance(node, ast.List):
        return any(is_proof(element) for element in node.elts)
    return ast.unparse(node) == "pytest.mark.proof"


def names_of(tree: ast.Module) -> dict[str, bool]:
    """The tests of a file by name, and whether they are proofs with all their parameters."""
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    marks = [node.value for node in assignments if ast.unparse(node.targets[0]) == "pytestmark"]
    tests = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {test.name: any(map(is_proof, [*marks, *test.decorator_list])) for test in tests}


def all_tests() -> dict[str, bool]:
    found: dict[str, bool] = {}
    for path in python_files(ROOT / "tests"):
        found |= {
            f"{relative(path)}::{test}": proof for test, proof in names_of(parse(path)).items()
        }
    return found


def named() -> dict[str, str]:
    """The representative of each proof that has a row, both as file::name."""
    rows = {}
    for file, tests in REPRESENTATIVES.items():
        rows |= {f"{file}::{test}": representative for test, representative in tests.items()}
    return rows


def test_proofs_are_told_by_their_own_mark_or_that_of_their_file():
    marked = (
        "import pytest\n@pytest.mark.ray\n@pytest.mark.proof\ndef test_a(): ...\ndef "
        "test_b(): ...\n"
    )
    assert names_of(ast.parse(marked)) == {"test_a": True, "test_b": False}
    whole_file = f"import pytest\npytestmark = [pytest.mark.ray, pytest.mark.proof]\n{marked}"
    assert names_of(ast.parse(whole_file)) == {"test_a": True, "test_b": True}
    of_a_value = (
        '@pytest.mark.parametrize("a", [1, pytest.param(2, '
        "marks=pytest.mark.proof)])\ndef test_a(a): ..."
    )
    assert names_of(ast.parse(of_a_value)) == {"test_a": False}


def test_every_proof_names_a_test_of_make_test_that_stands_for_it():
    is_proof_by_test, rows = all_tests(), named()
    proofs = {test for test, proof in is_proof_by_test.items() if proof}
    assert not proofs - rows.keys(), (
        "name in tests/representatives.toml what stands for these in `make test`"
    )
    assert not rows.keys() - proofs, "tests/representatives.toml has rows of what is no proof"
    unfit = {proof: name for proof, name in rows.items() if is_proof_by_test.get(name, True)}
    assert not unfit, f"these representatives are not there or are proofs themselves: {unfit}"
