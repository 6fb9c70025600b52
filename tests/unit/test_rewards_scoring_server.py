"""What a reward process makes of the value that a reward function returns, in this process."""

import numpy as np
import pytest

from verl_like.rewards.scoring_server import _checked, clipped


def test_scores_and_extra_metrics_become_plain_values() -> None:
    assert _checked(0.5) == {"score": 0.5, "extra": {}}
    assert _checked(np.float32(0.25)) == {"score": 0.25, "extra": {}}
    assert _checked(None) == {"score": None, "extra": {}}
    returned = {"score": 1, "acc": np.int64(3), 7: "seven"}
    assert _checked(returned) == {"score": 1.0, "extra": {"acc": 3, "7": "seven"}}


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (float("nan"), "nan (nan)"),
        (-2e39, "-2e+39 (-2e+39)"),
        ("1.0", "a str ('1.0')"),
        ({"acc": 2.0}, "a dict without the key 'score' ({'acc': 2.0})"),
        ({"score": 1.0, "acc": -float("inf")}, "extra 'acc' is -inf ("),
        ({"score": 1.0, "all": {3}}, "extra 'all' of type set, which is no JSON value ("),
        ({"score": 1.0, "a\ud800": 1}, "extra 'a\\ud800' of type str, which is no JSON value ("),
        ({"score": 1.0, "long": "x" * 65_600}, "extra metrics of more than 65536 bytes in JSON ("),
    ],
)
def test_what_is_no_score_is_told_with_what_is_expected(result: object, found: str) -> None:
    error = _checked(result)["error"]
    assert error.startswith(f"the function returned {found}")
    expected = "expected a finite number, "
    assert expected in error and _checked(result).keys() == {"error"}


def test_a_text_without_its_middle_keeps_as_much_of_both_ends() -> None:
    assert clipped("abcdefghij", 10) == "abcdefghij"
    assert clipped("abcdefghij", 6) == "abc ... hij"
    assert clipped("a\ud800b", 20) == "a\\ud800b"
