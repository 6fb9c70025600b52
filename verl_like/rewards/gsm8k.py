"""GSM8K: compares the number after `####` in the response with the ground truth."""

import re
from typing import Any

from verl_like.rewards.registry import register_reward

# The answer is at the end. Only the end is searched, so that a very long response takes no longer.
SOLUTION_CLIP_CHARS = 300
_NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+"
_PATTERNS = {"strict": re.compile(rf"#### ({_NUMBER})"), "flexible": re.compile(_NUMBER)}


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Returns the answer in a response without thousands separators, or None if there is none.

    With the `method` "strict" the answer is the last number that follows `####`. With "flexible" it
    is the last number. Raises ValueError for another method.
    """
    if method not in _PATTERNS:
        raise ValueError(f"method is {method!r}, expected 'strict' or 'flexible'")
    numbers = _PATTERNS[method].findall(solution_str[-SOLUTION_CLIP_CHARS:])
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
    """Returns `score` for the right answer, `format_score` for a wrong one in the right format, and
    0 if no answer is found."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    is_right = answer == str(ground_truth).replace(",", "")
    return score if is_right else format_score
