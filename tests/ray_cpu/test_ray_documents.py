"""The examples in the documents run and print what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "name",
    [
        "dispatch.md",
        "extending.md",
        pytest.param("placement.md", marks=[pytest.mark.ray, pytest.mark.proof]),
    ],
)
def test_the_example_prints_what_the_document_says(name, tmp_path):
    program, expected = re.search(
        r"```python\n((?:(?!```).)*)```\n\nprints\n\n```\n(.*?)```", (DOCS / name).read_text(), re.S
    ).groups()
    path = tmp_path / "example.py"
    path.write_text(program)
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected
