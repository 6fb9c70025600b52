"""The true reward as a metric: it is shown beside the learnt reward, and nothing is trained on
it."""

from typing import Any

from verl_like.rewards.exact_match import compute_score as exact_match


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """A score of 0, and as `acc` whether the response is the ground truth."""
    return {"score": 0.0, "acc": exact_match(data_source, solution_str, ground_truth)}
