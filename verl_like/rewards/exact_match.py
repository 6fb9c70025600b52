"""Exact match: compares the whole response, without surrounding white space, with the ground
truth."""

from typing import Any

from verl_like.rewards.registry import register_reward


@register_reward("exact_match", "exact_match/*", "verl_like/*")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | list[str],
    extra_info: dict[str, Any] | None = None,
) -> float:
    """Returns 1 if the response is the ground truth, or one of its entries if it is a list.
    Otherwise it returns 0."""
    answers = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    accepted = [str(answer).strip() for answer in answers]
    return float(solution_str.strip() in accepted)
