"""Rules of the charter that a look at the syntax tree can enforce."""

import ast
from collections import Counter

from source_tree import PACKAGE, ROOT, parse, python_files, relative

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES


def calls(tree: ast.AST) -> list[tuple[int, str]]:
    return [(n.lineno, ast.unparse(n.func)) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def offenders(names: set[str]) -> list[str]:
    found = ((path, line, name) for path in python_files() for line, name in calls(parse(path)))
    return [f"{relative(path)}:{line} {name}" for path, line, name in found if name in names]


def test_nothing_is_printed_outside_the_console():
    assert not offenders({"print"}), "use the run's console, or logging in a worker"


def test_no_untrusted_text_is_evaluated_and_no_pickle_is_loaded():
    forbidden = {
        "eval",
        "exec",
        "pickle.load",
        "pickle.loads",
        "cloudpickle.loads",
        "torch.load",
        "torch.save",
    }
    assert not offenders(forbidden)


def test_remote_code_is_never_switched_on_in_the_source():
    found = [
        relative(p)
        for p in python_files(PACKAGE, ROOT / "examples")
        if "trust_remote_code=True" in p.read_text()
    ]
    assert not found


def test_tokenizers_are_read_in_one_place():
    found = offenders({"AutoTokenizer.from_pretrained", "PreTrainedTokenizerFast.from_pretrained"})
    assert {entry.partition(":")[0] for entry in found} == {
        "verl_like/workers/models/pretrained.py"
    }


def test_no_module_assigns_into_a_third_party_module():
    violations = []
    for path in python_files():
        tree = parse(path)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        modules = {
            alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names
        }
        targets = [
            t for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets
        ]
        for target in targets:
            is_setting = ast.unparse(target) == "tempfile.tempdir"  # which Python documents as one
            if (
                isinstance(target, ast.Attribute)
                and ast.unparse(target.value) in modules
                and not is_setting
            ):
                violations.append(f"{relative(path)}:{target.lineno} {ast.unparse(target)}")
    assert not violations, f"third-party modules are not patched: {violations}"


def test_only_its_own_file_and_the_defaults_of_keys_name_an_algorithm():
    """What a run needs follows from the inputs that an algorithm declares, so no other code asks
    for its name."""
    names = {*ADVANTAGE_ESTIMATORS.names(), *POLICY_LOSSES.names()}
    naming = {
        (relative(path), node.value)
        for path in python_files()
        if "algorithms" not in path.parts
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and node.value in names
    }
    defaults = {
        ("verl_like/trainer/config/schema.py", "gae"),
        ("verl_like/workers/config/roles.py", "vanilla"),
    }
    assert naming == defaults


def test_placement_words_stay_out_of_workers_and_algorithms():
    found = [
        f"{relative(path)} mentions {word}"
        for path in python_files(PACKAGE / "workers", PACKAGE / "algorithms")
        for word in ("resource_pool", "role_mapping", "colocate")
        if word in path.read_text()
    ]
    assert not found, "placement is configuration and the controller's business"


def test_every_module_says_what_it_is_for():
    silent = [
        relative(p)
        for p in python_files()
        if p.name != "__init__.py" and not ast.get_docstring(parse(p))
    ]
    assert not silent


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports test files by their names alone, so that two of one name cannot be collected
    together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, files in names.items() if files > 1]
