"""Write the generated pages of docs/; tests/architecture/test_generated_docs.py finds stale ones."""

from pathlib import Path

from verl_like.protocol.columns import render_columns_table
from verl_like.trainer.config.reference import render_config_reference

DOCS = Path(__file__).parents[1] / "docs"


def write_page(name: str, text: str) -> None:
    (DOCS / name).write_text(text)


if __name__ == "__main__":
    write_page("columns.md", render_columns_table())
    write_page("config.md", render_config_reference())
