"""A hook of mkdocs: adds the pages that lie outside docs/ and one reference page for each
package."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "AGENTS.md": "charter.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/split_placement/README.md": "examples/split_placement.md",
    "examples/grpo/README.md": "examples/grpo.md",
    "examples/detached/README.md": "examples/detached.md",
    "examples/agents/README.md": "examples/agents.md",
    "examples/rlhf_three_stages/README.md": "examples/rlhf_three_stages.md",
    "examples/new_role/README.md": "examples/new_role.md",
    "examples/remote_reward/README.md": "examples/remote_reward.md",
}
"""Files of the repository and their pages in the site."""
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[\w-]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for package in sorted(path.parent for path in (ROOT / "verl_like").glob("*/__init__.py")):
        modules = [path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py"]
        names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
        content = "\n\n".join([f"# {package.name}", *(f"::: {name}" for name in names)])
        files.append(File.generated(config, f"reference/{package.name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files become links between pages; a file that is no page is named, not
    linked."""
    source_of = {page: source for source, page in OUTSIDE.items()}
    own = page.file.src_uri
    folder = posixpath.dirname(source_of.get(own, f"docs/{own}"))

    def relink(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(folder, path))
        target = OUTSIDE.get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        if target is None:
            return f"{text} (`{path}`)" if path not in text else f"`{path}`"
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(own) or '.')}{anchor or ''})"

    return LINK.sub(relink, markdown)
