"""Generated pages are what the code generates now."""

from source_tree import ROOT

from verl_like.protocol.columns import render_columns_table


def test_the_columns_page_is_fresh():
    assert (ROOT / "docs/columns.md").read_text() == render_columns_table(), "run: make docs"
