"""Write the generated pages and pictures of docs/; tests/architecture/test_generated_docs.py finds
stale ones."""

from pathlib import Path

from algorithms_page import render_algorithms_page
from columns_page import render_columns_table
from config_page import render_config_page, render_examples_page
from draw_pictures import PICTURES, draw

DOCS = Path(__file__).parents[1] / "docs"

if __name__ == "__main__":
    algorithms = DOCS / "algorithms.md"
    algorithms.write_text(render_algorithms_page(algorithms.read_text()))
    (DOCS / "columns.md").write_text(render_columns_table())
    (DOCS / "config.md").write_text(render_config_page())
    (DOCS / "config_examples.md").write_text(render_examples_page())
    for name, text in draw().items():
        (PICTURES / name).write_text(text)
