"""The responses to one prompt as a group: their scores, and statistics over them."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.masked import few_rows, zero_masked


@dataclass(frozen=True)
class PromptGroups:
    """The total rewards of B responses, grouped by prompt. Statistics are (B,) float64: each row
    has its group's value.

    A row without any response token was skipped: its score is 0 and counts in no statistic. In
    float64 the mean of equal float32 scores is exact, so that they deviate from it by exactly 0; in
    float32 the rounding error of the mean, divided by a small number, would become a visible
    advantage.
    """

    scores: Tensor
    """(B,) float64, the sum of each row's token rewards"""
    valid: Tensor
    """(B, R) bool, the response tokens"""
    scored: Tensor
    """(B,) bool, False for the rows that were skipped"""
    group: Tensor
    """(B,) int64, 0 to num_groups - 1"""
    num_groups: int

    @classmethod
    def of(
        cls, token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray
    ) -> "PromptGroups":
        """Groups the rows with equal entries in `index` (B,), of (B, R) rewards and mask."""
        valid = response_mask.bool()
        scores = token_level_rewards.new_zeros(len(valid), dtype=torch.float64)
        for rows in few_rows(valid):
            rewards = zero_masked(token_level_rewards[rows], valid[rows])
            scores[rows] = rewards.sum(dim=-1)
        number_of_key: dict[Hashable, int] = {}
        group_of_row = []
        for key in index:
            next_number = len(number_of_key)
            number = number_of_key.setdefault(key, next_number)
            group_of_row.append(number)
        group = torch.tensor(group_of_row, dtype=torch.long, device=scores.device)
        return cls(
            scores=scores,
            valid=valid,
            scored=valid.any(dim=-1),
            group=group,
            num_groups=len(number_of_key),
        )

    @property
    def is_single(self) -> Tensor:
        """(B,) bool, the rows whose group has one row by design, skipped or not."""
        sizes = torch.bincount(self.group)
        return sizes[self.group] == 1

    @property
    def num_scored(self) -> Tensor:
        """The number of scored rows in the group."""
        ones = torch.ones_like(self.scores)
        return self.sum(ones)

    @property
    def has_baseline(self) -> Tensor:
        """(B,) bool, the scored rows with another scored row in their group, or that are a group of
        one by design.

        The only scored row of a larger group has lost its baseline: its raw score is on another
        scale than the advantages of the other rows, so its advantage is 0.
        """
        has_others = self.num_scored > 1
        may_count = self.is_single | has_others
        return self.scored & may_count

    @property
    def differ(self) -> Tensor:
        """(B,) bool, the rows of groups that have two different scores.

        Equal scores have equal extremes, exactly; their mean may be rounded to another number.
        """
        largest = self.largest(self.scores, self.scored)
        smallest = -self.largest(-self.scores, self.scored)
        return largest > smallest

    def largest(self, row_values: Tensor, candidates: Tensor) -> Tensor:
        """Returns the largest of `row_values` (B,) among the `candidates` (B,) bool of the group.
        It is -infinity if there is none."""
        values = row_values.masked_fill(~candidates, -torch.inf)
        of_groups = values.new_full((self.num_groups,), -torch.inf)
        of_groups.scatter_reduce_(0, self.group, values, "amax")
        return of_groups[self.group]

    def sum(self, row_values: Tensor) -> Tensor:
        """Returns the sum of `row_values` (B,) over the scored rows of the group."""
        counted = zero_masked(row_values, self.scored)
        totals = self.scores.new_zeros(self.num_groups)
        totals.index_add_(0, self.group, counted)
        return totals[self.group]

    def mean(self) -> Tensor:
        """Returns the mean score of the group."""
        num_scored = self.num_scored.clamp(min=1)
        return self.sum(self.scores) / num_scored

    def std(self) -> Tensor:
        """Returns the unbiased standard deviation of the scores. It is 1 for a group of one by
        design, and 0 if one row is scored."""
        deviations = self.scores - self.mean()
        num_others = (self.num_scored - 1).clamp(min=1)
        sum_squares = self.sum(deviations**2)
        variance = sum_squares / num_others
        return torch.where(self.is_single, 1.0, variance.sqrt())

    def scores_above(self, baseline: Tensor) -> Tensor:
        """Returns the score - `baseline` (B,). It is the score itself for a group of one by design,
        and 0 for a row without a baseline."""
        subtracted = zero_masked(baseline, ~self.is_single)
        above = self.scores - subtracted
        return zero_masked(above, self.has_baseline)

    def on_tokens(self, row_values: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns each row's value at every one of its response tokens, and 0 elsewhere, (B, R)."""
        values = row_values.to(dtype).unsqueeze(-1)
        return zero_masked(values, self.valid)
