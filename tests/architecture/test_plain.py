"""The code is not dense: scripts/plain.py measures, and these are its limits."""

import textwrap

import pytest
from source_tree import PACKAGE

from scripts.plain import measure, sources_in

DENSE = textwrap.dedent(
    '''
    """Of no matter."""

    a, b = 1, 2
    c, d = zip(*pairs, strict=True)
    e = [x for y in z for x in y]
    f = 1 if a else 2 if b else 3
    if g := a:
        h = (i := b) + 1  # a comment
    while (j := a) > 2:
        """Whether nothing."""
    '''
)


def test_the_columns_of_a_dense_file_are_those_that_were_counted_by_hand():
    row = measure([DENSE])
    # 7, 13, 13, 11, 5, 9 and 9 tokens on the seven lines of code.
    assert row["tokens"] == 67
    assert row["code lines"] == 7
    assert row["a line"] == pytest.approx(67 / 7)
    # Four assignments, an `if` with one more, and a `while`.
    assert row["a statement"] == pytest.approx(67 / 7)
    assert row["packed"] == row["zip"] == row["nested"] == row["chained"] == pytest.approx(1000 / 7)
    # That within the assignment: the other two are conditions.
    assert row[":="] == pytest.approx(1000 / 7)
    assert row["of %"] == 100
    assert row[">100 %"] == 0


def test_a_line_of_more_than_100_columns_is_counted():
    assert measure(["x = 1\n", "# " + 99 * "-" + "\n"])[">100 %"] == 50


def test_the_package_is_not_dense():
    row = measure(sources_in(PACKAGE))
    limits = {"a line": 8.2, "packed": 1, "nested": 2, "chained": 0.5, "zip": 0.5, ":=": 1}
    above = {name: row[name] for name, limit in limits.items() if row[name] > limit}
    assert not above, "name the steps of dense lines: python scripts/plain.py verl_like/*"
