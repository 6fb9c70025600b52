"""scripts/mutants.toml names what is in the source."""

import ast
import tomllib

from source_tree import ROOT

WANTED = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())


def test_every_area_of_the_mutants_has_files_and_the_functions_that_are_named():
    for area in WANTED["area"]:
        missing = [pattern for pattern in area["files"] if not list(ROOT.glob(pattern))]
        assert not missing, f"scripts/mutants.toml, area {area['name']}: there is no {missing}"
        for file, functions in area.get("functions", {}).items():
            assert file in area["files"]
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            assert defined >= set(functions), (
                f"scripts/mutants.toml: {file} lacks {set(functions) - defined}"
            )


def test_every_named_mutant_changes_one_place():
    counts = {
        (named["file"], named["before"]): (ROOT / named["file"]).read_text().count(named["before"])
        for named in WANTED["named"]
    }
    wrong = {place: count for place, count in counts.items() if count != 1}
    assert not wrong, (
        f"scripts/mutants.toml: the text has changed, or is there more than once: {wrong}"
    )
