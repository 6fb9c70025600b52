"""From a configuration value to the number it names: the trainer's own steps against the
independent reference."""

import ast
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import step_llama
import step_reference
import step_runs
import step_table
import step_world
from step_table import (
    DEFAULT,
    LAYOUT,
    ON_TWO_RANKS,
    PRECISION,
    REACHES_A_FORMULA,
    REACHES_NO_FORMULA,
    RUNS,
)

from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.keys import leaves

Expected = Callable[[str], step_reference.Trained]
MODEL_PATH = "actor_rollout_ref.model.path"


def assert_equal(got: step_reference.Trained, expected: step_reference.Trained) -> None:
    off = step_reference.errors(got, expected)
    wrong = {name: f"{error:.1f} times what may be" for name, error in off.items() if not error < 1}
    assert off and not wrong


@pytest.mark.parametrize("run", RUNS)
def test_one_process_computes_what_the_reference_does(
    run: str, world_folder: Path, expected: Expected
):
    settings = step_table.settings_of(run, world_folder) | {"trainer.n_gpus_per_node": 1}
    assert_equal(step_runs.train(settings, step_runs.start_local_groups, steps=2), expected(run))


@pytest.mark.proof
@pytest.mark.ray
def test_two_ranks_compute_what_the_reference_does(world_folder: Path, expected: Expected):
    with step_runs.two_processes() as start:
        for run in RUNS:
            settings = step_table.settings_of(run, world_folder, **ON_TWO_RANKS[run]) | {
                "trainer.n_gpus_per_node": 2
            }
            assert_equal(step_runs.train(settings, start, steps=2), expected(run))


@pytest.mark.parametrize("key", REACHES_A_FORMULA)
def test_a_run_would_compute_something_else_without_the_key(
    key: str, world_folder: Path, expected: Expected
):
    run, other = REACHES_A_FORMULA[key]
    defaults, settings = step_runs.defaults(), step_table.settings_of(run, world_folder)
    assert key in settings and settings[key] != defaults[key]
    other = defaults[key] if other == DEFAULT else step_table.filled(other, world_folder)
    without = step_reference.train(defaults | settings | {key: other}, steps=2)
    assert max(step_reference.errors(without, expected(run)).values()) > 10


def test_every_key_has_its_place_in_the_table():
    places = [
        *REACHES_A_FORMULA,
        *LAYOUT,
        *(key for keys in REACHES_NO_FORMULA.values() for key in keys),
    ]
    assert sorted(places) == sorted(key for key, _, _ in leaves(PPOConfig))


@pytest.mark.parametrize("word", REACHES_NO_FORMULA)
def test_a_key_that_reaches_no_formula_is_named_by_a_test_of_its_own(word: str):
    texts = [(Path(__file__).parents[2] / file).read_text() for file in step_table.PLACES[word]]
    for key in REACHES_NO_FORMULA[word]:
        assert any(re.search(rf"\b{key.rpartition('.')[2]}\b", text) for text in texts), key


def test_the_runs_use_every_layout():
    plain = load_ppo_config(
        ["device=cpu", *(f"{key}=x" for key in ("data.train_files", "data.val_files", MODEL_PATH))]
    )
    given = [run.items() for run in (step_table.COMMON, *RUNS.values(), *ON_TWO_RANKS.values())]
    for key in LAYOUT:
        value = attrgetter(key)(plain)
        assert any(
            name == key and other != value for settings in given for name, other in settings
        ), key


def test_the_runs_hold_what_a_batch_may_hold(expected: Expected):
    for run in ("gae", "warm-up", "grpo"):
        last = expected(run).metrics[-1]
        assert 0 < last["actor/pg_clipfrac_lower"] < last["actor/pg_clipfrac"] < 1
    assert all(
        0 < m["critic/vf_clipfrac"] < 1 for run in ("gae", "warm-up") for m in expected(run).metrics
    )
    assert all(
        m["reward/num_skipped"] > 0
        for run in ("gae", "warm-up", "grpo")
        for m in expected(run).metrics
    )
    assert [expected(run).metrics[0]["reward/num_errors"] for run in ("gae", "one step")] == [1, 1]
    for run in RUNS:
        for metrics in expected(run).metrics:
            assert metrics["response_length/min"] < metrics["response_length/max"]
            assert metrics["prompt_length/min"] < metrics["prompt_length/max"]
    numbers = {
        run: [len(gradients) for gradients in expected(run).gradients.values()] for run in RUNS
    }
    assert numbers == {
        **{"gae": [8, 8], "warm-up": [4, 8], "grpo": [4], "one step": [2, 4]},
        **{"corrected": [2], "bypass": [4]},
    }


@pytest.mark.parametrize("key", PRECISION)
def test_bfloat16_reaches_the_model_that_the_key_names_and_no_other(
    key: str, world_folder: Path, expected: Expected
):
    run, changed, unchanged = PRECISION[key]
    settings = step_table.settings_of(run, world_folder) | {
        "trainer.n_gpus_per_node": 1,
        key: "bfloat16",
    }
    got = step_runs.train(settings, step_runs.start_local_groups, steps=1)
    of_first_step = step_reference.Trained(expected(run).metrics[:1], {}, {})
    off = step_reference.errors(step_reference.Trained(got.metrics, {}, {}), of_first_step)
    assert 10 < off[f"step 1 {changed}"] < 10_000 and off[f"step 1 {unchanged}"] < 1


@pytest.mark.parametrize("module", [step_reference, step_llama, step_table, step_world])
def test_the_reference_imports_nothing_of_what_it_checks(module: object):
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [a.name for node in imports for a in node.names] + [
        getattr(node, "module", "") or "" for node in imports
    ]
    assert names and not any("verl_like" in name or "step_runs" in name for name in names)
