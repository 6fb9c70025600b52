"""Generated pages are what the code generates now."""

import sys

from source_tree import ROOT

sys.path.append(str(ROOT / "scripts"))
from algorithms_page import render_algorithms_page
from columns_page import render_columns_table
from config_page import EXAMPLES, render_config_page, render_examples_page
from draw_pictures import KIND_OF_METHOD, PICTURES, draw, ledger_changes

from verl_like.trainer.config.keys import leaves


def test_the_algorithms_page_is_fresh():
    page = (ROOT / "docs/algorithms.md").read_text()
    assert page == render_algorithms_page(page), "run: make docs"


def test_the_columns_page_is_fresh():
    assert (ROOT / "docs/columns.md").read_text() == render_columns_table(), "run: make docs"


def test_the_configuration_page_is_fresh():
    assert (ROOT / "docs/config.md").read_text() == render_config_page(), "run: make docs"


def test_the_page_of_keys_of_training_on_examples_is_fresh():
    page = (ROOT / "docs/config_examples.md").read_text()
    assert page == render_examples_page(), "run: make docs"


def test_the_page_of_keys_of_training_on_examples_has_every_key_of_its_trainers():
    page = (ROOT / "docs/config_examples.md").read_text()
    common, *of_trainers = page.split("\n## Of ")
    own = {text.partition("\n")[0]: text for text in of_trainers}
    for name, schema in EXAMPLES.items():
        for path, _, key in leaves(schema):
            section = path.rpartition(".")[0]
            table = common.partition(f"\n## `{section}`\n")[2].partition("\n## ")[0]
            where = table if section else common
            assert f"| `{key}` |" in where or f"| `{path}` |" in own.get(name, ""), path


def test_the_pictures_are_fresh_and_each_is_shown_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    drawn = draw()
    assert {path.name for path in PICTURES.glob("*.svg")} == drawn.keys()
    for name, text in drawn.items():
        assert (PICTURES / name).read_text() == text, "run: make docs"
        assert f"(pictures/{name})" in pages


def test_the_picture_of_the_ledger_has_each_state_and_call_of_a_prompt():
    states = ["not_started", "in_flight", "in_buffer", "training", "trained"]
    way = list(zip(states, ["take", "deliver", "choose", "trained"], states[1:], strict=False))
    lost = [("in_flight", "lost", "again"), ("in_flight", "lost", "dropped/maker_lost")]
    lost.append(("in_flight", "drop", "dropped/agents_failed"))
    resumed = [
        (state, "a resumed run", "again") for state in ("in_flight", "in_buffer", "training")
    ]
    assert set(ledger_changes()) == {*way, *lost, ("again", "take", "in_flight"), *resumed}


def test_the_picture_of_pools_names_methods_that_workers_have():
    source = "".join(path.read_text() for path in (ROOT / "verl_like").rglob("*.py"))
    missing = [
        name
        for name in KIND_OF_METHOD
        if f"def {name}(" not in source and f'"{name}"' not in source
    ]
    assert not missing
