"""The page of forms names lines that are in the source, and counts what it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/forms.md").read_text()
MOST = {
    "Sample": 2,
    "Prompt to vLLM and back": 5,
    "Rule reward": 4,
    "Weights": 5,
    "Checkpoint": 4,
    "Detached sample": 1,
}
"""The walks with the most forms that each may have."""


def rows_of(walk: str) -> list[list[str]]:
    """The cells of the table of a walk, row by row."""
    (section,) = re.findall(rf"^## {walk}\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def without_layout(code: str) -> str:
    """Source without what its formatter decides: blanks, line breaks and commas before a bracket."""
    return re.sub(r",(?=[)\]}])", "", "".join(code.split()))


@pytest.mark.parametrize("walk", MOST)
def test_each_line_that_a_walk_names_is_in_the_source(walk: str):
    for *_, form, _, _, _, place in rows_of(walk):
        file, code = re.fullmatch(r"`(verl_like/[\w/]+\.py)`: `(.+)`", place).groups()
        assert without_layout(code.replace("\\|", "|")) in without_layout(
            (ROOT / file).read_text()
        ), f"{walk}, {form}: {file} has no such line any more"


@pytest.mark.parametrize("walk", MOST)
def test_a_walk_has_no_more_forms_than_it_may_and_as_many_as_the_page_says(walk: str):
    rows = rows_of(walk)
    numbers = [int(number) for number, *_ in rows if number]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= MOST[walk]
    said = re.search(
        rf"^\| {walk} \| \d+ \| (\d+) \| \d+ \| (\d+) \|$", PAGE, re.MULTILINE | re.IGNORECASE
    )
    assert said and (int(said[1]), int(said[2])) == (len(numbers), len(rows))
