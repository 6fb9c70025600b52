"""The names in docs/metrics.md as patterns."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/metrics.md"


def documented_names() -> list[str]:
    """The first cell of each row of the tables, with {a,b} written out."""
    names = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    return [name for written in names for name in _written_out(written)]


def _written_out(name: str) -> list[str]:
    match = re.search(r"\{([^}]*)\}", name)
    if match is None:
        return [name]
    parts = match.group(1).split(",")
    return [
        n
        for part in parts
        for n in _written_out(name[: match.start()] + part + name[match.end() :])
    ]


def undocumented(emitted: set[str]) -> list[str]:
    """Metrics that no row of the page describes; `<...>` in a row stands for any text."""
    patterns = [
        re.sub(r"<[^>]*>", ".+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))
        for name in documented_names()
    ]
    return sorted(
        name for name in emitted if not any(re.fullmatch(pattern, name) for pattern in patterns)
    )
