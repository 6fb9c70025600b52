"""Paths, links and anchors lead somewhere, every page of docs/ is in the site, and the README shows
the source."""

import re
import textwrap
from pathlib import Path

import yaml
from source_tree import ROOT

FOLDERS = "verl_like|examples|docs|tests|scripts|benchmarks|requirements"
PATH = re.compile(rf"`((?:{FOLDERS})/\w[\w./-]+)`|\]\((?!https?:)([\w./-]+)(?:#[\w-]+)?\)")
ANCHOR = re.compile(r"\]\((?!https?:)([\w./-]*)#([\w-]+)\)")
DOCUMENTS = [
    *ROOT.glob("*.md"),
    ROOT / "benchmarks/README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]

EXCERPT = re.compile(r"\]\((verl_like/[\w/]+\.py)\):\n\n```python\n(.*?)```", re.DOTALL)


def named_paths(text: str) -> list[str]:
    return [quoted or linked for quoted, linked in PATH.findall(text)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings: lower case, spaces as hyphens, without punctuation; code
    blocks have none."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_the_pattern_finds_quoted_paths_and_links():
    assert named_paths("see `verl_like/a.py` and [b](docs/b.md#c)") == [
        "verl_like/a.py",
        "docs/b.md",
    ]


def test_anchors_are_those_of_headings_outside_code():
    assert anchors("# On a GPU?\n```bash\n# no heading\n```\n## `data.n` or so") == {
        "on-a-gpu",
        "datan-or-so",
    }


def test_every_path_in_the_documents_exists():
    missing = [
        f"{document.relative_to(ROOT)} names {name}"
        for document in DOCUMENTS
        for name in named_paths(document.read_text())
        if not (ROOT / name).exists() and not (document.parent / name).exists()
    ]
    assert not missing, "\n".join(missing)


def test_every_anchor_in_the_documents_is_a_heading_of_the_page():
    def page(document: Path, name: str) -> Path:
        return document.parent / name if name else document

    missing = [
        f"{document.relative_to(ROOT)} links to {name}#{anchor}"
        for document in DOCUMENTS
        for name, anchor in ANCHOR.findall(document.read_text())
        if anchor not in anchors(page(document, name).read_text())
    ]
    assert not missing, "\n".join(missing)


GENERATED = {"gpu_rehearsal.md", "memory_plan.md", "mutants.md", "proofs.md", "same_numbers.md"}
"""The pages of results, which commands write."""


def test_each_page_says_first_for_whom_it_is():
    silent = []
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"<!--.*?-->\n", "", page.read_text())
        paragraphs = [each for each in text.split("\n\n") if not each.startswith("#")]
        if not re.search(r"\b[Ff]or (those|whoever)\b", paragraphs[0]):
            silent.append(page.name)
    assert set(silent) <= GENERATED, f"begin these with whom they are for: {silent}"


def test_the_site_has_every_page_of_docs():
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in pages(child)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    missing = {
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")
    } - set(listed)
    assert not missing, f"add these pages to nav in mkdocs.yml: {missing}"


def test_every_class_that_the_glossary_names_is_in_the_source():
    page = (ROOT / "docs/glossary.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "verl_like").rglob("*.py"))
    named = set(re.findall(r"`([A-Z][a-z]\w+)(?:\.\w+)?`", page))
    known = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    known |= set(re.findall(r"^([A-Z][a-z]\w+) = ", source, re.MULTILINE))
    missing = named - known - {"DeviceMesh"}  # of torch
    assert not missing, f"the glossary names classes that do not exist: {missing}"


def test_the_loop_in_the_readme_is_the_source_line_by_line():
    excerpts = EXCERPT.findall((ROOT / "README.md").read_text())
    files = [
        "training_loop.py",
        "ray_trainer.py",
        "experience_maker.py",
        "experience_maker.py",
        "learner.py",
    ]
    assert [path.rpartition("/")[2] for path, _ in excerpts] == files
    for path, code in excerpts:
        lines = textwrap.indent(code, 8 * " ").splitlines()  # of a method
        source = (ROOT / path).read_text().splitlines()
        start = source.index(lines[0])
        assert source[start : start + len(lines)] == lines, path
