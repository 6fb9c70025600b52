"""Writes pages of HTML that need no other file and no network."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ text-align: left; vertical-align: top; }}
td, th {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; }}
pre {{ background: #f6f8fa; padding: 1rem; overflow-x: auto; }}
{style}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_page(path: Path, title: str, body: str, style: str) -> None:
    """Writes a page. `title` is text, and `body` is HTML in which all text is escaped already.
    Raises OSError."""
    escaped = html.escape(title)
    text = PAGE.format(title=escaped, body=body, style=style)
    # A lone surrogate cannot be written in UTF-8, so its code is written instead.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table of values. The keys of the first row are its head."""
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = "".join(_table_row(row) for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _table_row(row: Mapping[str, object]) -> str:
    cells = "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values())
    return f"<tr>{cells}</tr>"
