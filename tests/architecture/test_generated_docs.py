"""Generated pages are what the code generates now."""

import sys

from source_tree import ROOT

sys.path.append(str(ROOT / "scripts"))
from algorithms_page import render_algorithms_page
from columns_page import render_columns_table
from config_page import render_config_page


def test_the_algorithms_page_is_fresh():
    page = (ROOT / "docs/algorithms.md").read_text()
    assert page == render_algorithms_page(page), "run: make docs"


def test_the_columns_page_is_fresh():
    assert (ROOT / "docs/columns.md").read_text() == render_columns_table(), "run: make docs"


def test_the_configuration_page_is_fresh():
    assert (ROOT / "docs/config.md").read_text() == render_config_page(), "run: make docs"
