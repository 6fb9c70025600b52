"""The sample that a reward function scores. Reward processes import this file, so it imports no
large library."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewardSample:
    """One response to score."""

    name: str
    """What messages call the sample, for instance "sample uid '0-17'"."""
    data_source: str
    solution_str: str
    """The decoded response without the prompt."""
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    raw_prompt: list[dict[str, Any]] | None = None
    """The chat messages of the prompt."""
