"""Write the generated pages of docs/; tests/architecture/test_generated_docs.py finds stale ones."""

from pathlib import Path

from columns_page import render_columns_table
from config_page import render_config_page

DOCS = Path(__file__).parents[1] / "docs"

if __name__ == "__main__":
    (DOCS / "columns.md").write_text(render_columns_table())
    (DOCS / "config.md").write_text(render_config_page())
