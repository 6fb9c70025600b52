"""Paths that the documents name exist."""

import re

from source_tree import ROOT

FOLDERS = "verl_like|examples|docs|tests|scripts|benchmarks|requirements"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`|\]\((?!https?:)([\w./-]+)(?:#[\w-]+)?\)")


def named_paths(text: str) -> list[str]:
    return [quoted or linked for quoted, linked in PATH.findall(text)]


def test_the_pattern_finds_quoted_paths_and_links():
    assert named_paths("see `verl_like/a.py` and [b](docs/b.md#c)") == ["verl_like/a.py", "docs/b.md"]


def test_every_path_in_the_documents_exists():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    missing = [
        f"{document.relative_to(ROOT)} names {name}"
        for document in documents
        for name in named_paths(document.read_text())
        if not (ROOT / name).exists() and not (document.parent / name).exists()
    ]
    assert not missing, "\n".join(missing)
