"""docs/metrics.md and the source name the same metrics."""

import ast
import re
from fnmatch import fnmatchcase

from documented_metrics import documented_names
from source_tree import PACKAGE, parse, python_files, relative

PREFIX = re.compile(
    r"(actor|agent|critic|global_seqlen|perf|prompt_length|response_length|reward|rollout|timing_s|training)/\S*[^_/\s]"
)


def names_in(tree: ast.AST) -> list[str]:
    """String constants that are metrics or the beginning of some, and f-strings with * for what is
    filled in."""
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "*"
                    for part in node.values
                )
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            texts.append(node.value)
    return [text for text in texts if PREFIX.fullmatch(text)]


def test_names_are_found_in_strings_and_f_strings():
    assert names_in(ast.parse("a = 'actor/loss'\nb = f'perf/mfu/{phase}'\nc = 'a/b'")) == [
        "actor/loss",
        "perf/mfu/*",
    ]


def test_every_metric_of_the_source_is_in_the_page():
    described = documented_names()
    missing = [
        f"{relative(path)}: {name}"
        for path in python_files()
        if not path.is_relative_to(PACKAGE / "algorithms")  # described with their algorithm
        for name in names_in(parse(path))
        if not any(fnmatchcase(d, name) or fnmatchcase(d, f"{name}/*") for d in described)
    ]
    assert not missing, f"describe these in docs/metrics.md: {missing}"


def test_every_metric_of_the_page_is_in_the_source():
    source = "\n".join(path.read_text() for path in python_files())

    def has(part: str) -> bool:
        """Whether the part begins a word, or its end follows what an f-string fills in."""
        whole, end = re.escape(part), re.escape(part.split("_")[-1])
        # The text before is looked at last, so that the search is one for a plain text.
        return bool(
            re.search(rf"{whole}(?<![a-z]{whole})", source)
            or re.search(rf"{{\w+}}_?{end}\b", source)
            # What is counted by a name is a metric of the same name
            or re.search(rf'counts\[f?"{re.escape(part.removeprefix("num_"))}["/]', source)
        )

    stale = [
        name
        for name in documented_names()
        for part in re.sub(r"<[^>]*>", "", name).replace("@", "/").split("/")
        if part and not has(part)
    ]
    assert not stale, f"no code emits these, remove them from docs/metrics.md: {stale}"
