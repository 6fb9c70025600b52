"""From a configuration value to the number it names, for the trainers of examples: their steps
against a reference."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import examples_reference
import examples_runs
import examples_table
import examples_world
import pytest
import step_reference
import step_runs
import step_table
from examples_table import DEFAULT, ELSEWHERE, KINDS, LAYOUT, OWN, REACHES_A_FORMULA, RUNS

from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.keys import leaves

STEPS = 3
SLACK = 5
"""In units of what numbers of the size of 1 may differ by: an answer's log-probability is a sum of
the size of 10."""
Expected = Callable[[str, str], step_reference.Trained]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(world_folder: Path) -> Path:
    """The world, with the examples in it."""
    examples_runs.write_examples(world_folder)
    return world_folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """What the steps of a kind's run are by the reference."""

    @cache
    def of_run(kind: str, run: str) -> step_reference.Trained:
        defaults = step_runs.defaults(examples_runs.KINDS[kind][0])
        return examples_reference.train(
            kind, defaults | examples_table.settings_of(kind, run, folder), STEPS
        )

    return of_run


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_examples_computes_what_the_reference_does(
    kind: str, run: str, folder: Path, expected: Expected
):
    settings = examples_table.settings_of(kind, run, folder)
    off = step_reference.errors(examples_runs.train(kind, settings, STEPS), expected(kind, run))
    wrong = {
        name: f"{error:.1f} times what may be" for name, error in off.items() if not error < SLACK
    }
    assert off and not wrong


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind in KINDS for key in REACHES_A_FORMULA[kind]]
)
def test_a_run_on_examples_would_compute_something_else_without_the_key(
    kind: str, key: str, folder: Path, expected: Expected
):
    run, other = REACHES_A_FORMULA[kind][key]
    defaults = step_runs.defaults(examples_runs.KINDS[kind][0])
    settings = examples_table.settings_of(kind, run, folder)
    assert key in settings and settings[key] != defaults[key]
    if isinstance(other, str):
        other = step_table.filled(other, folder).replace(
            "{model}", Path(settings["model.path"]).name
        )
    other = defaults[key] if other == DEFAULT else other
    without = examples_reference.train(kind, defaults | settings | {key: other}, STEPS)
    found = step_reference.errors(padded(without), padded(expected(kind, run)))
    assert max(found.values()) > 2 * SLACK


def padded(trained: step_reference.Trained) -> step_reference.Trained:
    """With an empty row of metrics where there was no validation."""
    missing = STEPS + 1 - len(trained.metrics)
    return step_reference.Trained(
        [*trained.metrics, *[{}] * missing], trained.gradients, trained.parameters
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_training_on_examples_has_its_place(kind: str):
    places = ELSEWHERE | examples_table.OWN_ELSEWHERE.get(kind, {})
    elsewhere = [key for keys in places.values() for key in keys]
    keys = [key for key, _, _ in leaves(examples_runs.KINDS[kind][0])]
    assert sorted([*REACHES_A_FORMULA[kind], *LAYOUT, *elsewhere]) == sorted(keys)


def test_every_key_of_detached_training_has_its_place():
    elsewhere = [key for keys in examples_table.DETACHED_ELSEWHERE.values() for key in keys]
    of_ppo = [*step_table.REACHES_A_FORMULA, *step_table.LAYOUT]
    of_ppo += [key for keys in step_table.REACHES_NO_FORMULA.values() for key in keys]
    assert sorted([*of_ppo, *elsewhere]) == sorted(key for key, _, _ in leaves(DetachedConfig))


PLACES = ELSEWHERE | examples_table.OWN_ELSEWHERE["sft"] | examples_table.DETACHED_ELSEWHERE


@pytest.mark.parametrize("file", PLACES)
def test_a_test_that_is_named_as_the_place_of_a_key_sets_it(file: str):
    text = (ROOT / file).read_text()
    for key in PLACES[file]:
        assert re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", text), (
            f"{file} does not name {key}"
        )


def test_the_runs_on_examples_use_every_layout():
    for kind in KINDS:
        defaults = step_runs.defaults(examples_runs.KINDS[kind][0])
        for key in LAYOUT:
            assert any(key in run and run[key] != defaults[key] for run in RUNS.values()), key
    assert {run for _, run in OWN} <= RUNS.keys()


def test_the_examples_hold_what_examples_may_hold(expected: Expected):
    for kind in KINDS:
        limit = OWN[kind, "in order"]["training.grad_clip"]
        norms = [metrics[f"{kind}/grad_norm"] for metrics in expected(kind, "in order").metrics]
        assert min(norms) < limit < max(norms)
    metrics = expected("dpo", "in order").metrics
    assert metrics[0]["dpo/margin"] == 0 and 0 < metrics[2]["dpo/accuracy"] < 1
    assert 0 < expected("rm", "in order, decaying").metrics[2]["rm/accuracy"] < 1
    lengths = [
        len(ids)
        for row in examples_world.TALKS
        for ids, _ in [examples_world.tokens_of_talk(row, "=")]
    ]
    assert max(lengths) > 10 and sum(length > 9 for length in lengths) == 1


@pytest.mark.parametrize("module", [examples_reference, examples_world, examples_table])
def test_the_reference_of_examples_imports_nothing_of_what_it_checks(module: object):
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [a.name for node in imports for a in node.names] + [
        getattr(node, "module", "") or "" for node in imports
    ]
    assert names and not any("verl_like" in name or name.endswith("_runs") for name in names)
