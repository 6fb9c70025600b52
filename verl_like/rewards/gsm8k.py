"""GSM8K: the number after `####` in the response against the ground truth."""

import re
from typing import Any

from verl_like.rewards.registry import register_reward

# An answer stands at the end. Looking only there keeps the search cheap on a response that ran
# away.
SOLUTION_CLIP_CHARS = 300
_NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+"
_STRICT = re.compile(rf"#### ({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer in a response, without thousands separators, or None when there is none.

    `method`: `strict` takes the last number that follows `####`, `flexible` the last number of any
    kind; others raise ValueError.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}, expected 'strict' or 'flexible'")
    numbers = (_STRICT if method == "strict" else _FLEXIBLE).findall(
        solution_str[-SOLUTION_CLIP_CHARS:]
    )
    return numbers[-1].replace(",", "") if numbers else None


@register_reward("openai/gsm8k", "gsm8k")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong one in the right format, 0 when no
    answer is found."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == str(ground_truth).replace(",", "") else format_score
