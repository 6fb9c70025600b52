"""Generated pages are what the code generates now."""

import sys

from source_tree import ROOT

sys.path.append(str(ROOT / "scripts"))
from algorithms_page import render_algorithms_page
from columns_page import render_columns_table
from config_page import EXAMPLES, render_config_page, render_examples_page

from verl_like.trainer.config.compose import leaves


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
