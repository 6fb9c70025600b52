"""What is scored. The driver makes it and a reward process reads it, so this file imports nothing
heavy."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewardSample:
    """One response to score. `solution_str` is the decoded response only, without the prompt."""

    name: str  # what messages call it, such as "sample uid '0-17'"
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    raw_prompt: list[dict[str, Any]] | None = None  # chat messages
