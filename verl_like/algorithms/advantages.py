"""Advantage estimators: the registry, GAE and GRPO.

B rows, R padded response length. To add an estimator, decorate a function `AdvantageInputs -> (advantages, returns)`
with `@register_adv_est("name")` and set `algorithm.adv_estimator=name`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch

from verl_like.algorithms.masked import masked_whiten, zero_masked


@dataclass(frozen=True)
class AdvantageInputs:
    """All an estimator may read. Estimators read it and return new tensors; they never write into it.

    Raises:
        ValueError: tensors of different shapes, or an index of another length than the rows.
    """

    token_level_rewards: torch.Tensor
    """(B, R) float"""
    response_mask: torch.Tensor
    """(B, R) bool or 0/1; a row of zeros is a sample that was skipped"""
    gamma: float
    """discount per token"""
    lam: float
    """lambda of GAE"""
    norm_adv_by_std_in_grpo: bool
    """divide by the group's standard deviation"""
    values: torch.Tensor | None = None
    """(B, R) float, the critic's predictions; None without a critic"""
    index: np.ndarray | None = None
    """(B,) hashable objects: rows with an equal entry answer the same prompt (the `uid` column)"""

    def __post_init__(self) -> None:
        shape = self.token_level_rewards.shape
        for name, tensor in (("response_mask", self.response_mask), ("values", self.values)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} but token_level_rewards has {tuple(shape)}: "
                    "all per-token inputs must be (B, R)"
                )
        if self.index is not None and len(self.index) != shape[0]:
            raise ValueError(f"index has {len(self.index)} entries for {shape[0]} rows: it needs one prompt id per row")


AdvantageEstimatorFn = Callable[[AdvantageInputs], tuple[torch.Tensor, torch.Tensor]]
"""Returns advantages (B, R) and returns (B, R), both 0 where response_mask is 0."""

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimatorFn] = {}

_GAE_BLOCK = 64
_TOKENS_IN_CACHE = 1 << 19


def register_adv_est(name: str) -> Callable[[AdvantageEstimatorFn], AdvantageEstimatorFn]:
    """Decorator: makes an estimator known as `name`.

    Raises:
        ValueError: the name is taken.
    """

    def decorator(function: AdvantageEstimatorFn) -> AdvantageEstimatorFn:
        if name in ADVANTAGE_ESTIMATORS:
            raise ValueError(
                f"advantage estimator {name!r} is already registered ({ADVANTAGE_ESTIMATORS[name]!r}): "
                "choose another name"
            )
        ADVANTAGE_ESTIMATORS[name] = function
        return function

    return decorator


def get_adv_estimator_fn(name: str) -> AdvantageEstimatorFn:
    """The estimator registered as `name`.

    Raises:
        ValueError: no such estimator; the message lists the known ones.
    """
    if name not in ADVANTAGE_ESTIMATORS:
        raise ValueError(
            f"unknown advantage estimator {name!r}: known are {', '.join(sorted(ADVANTAGE_ESTIMATORS))}; "
            "add one with @register_adv_est"
        )
    return ADVANTAGE_ESTIMATORS[name]


def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al., arXiv 1506.02438), whitened over the response tokens.

    Over the tokens with mask 1, V = 0 after the last one:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, returns = A + V, then A is whitened.
    "t+1" is the next token *with mask 1*: tokens in a hole of the mask (a tool's output) take no discount, and their
    rewards and values are not read.

    Args:
        token_level_rewards, values: (B, R) float.
        response_mask: (B, R) bool or 0/1.
        gamma: discount per token.
        lam: lambda.

    Returns:
        advantages and returns, (B, R), 0 where the mask is 0.
    """
    with torch.no_grad():
        valid = response_mask.bool()
        advantages, returns = torch.empty_like(values), torch.empty_like(values)
        for rows in _few_rows(valid):
            advantages[rows], returns[rows] = _gae(token_level_rewards[rows], values[rows], valid[rows], gamma, lam)
        return masked_whiten(advantages, valid), returns


def _few_rows(matrix: torch.Tensor) -> list[slice]:
    """Slices of the rows of (B, R), few enough at a time that what is computed for them stays in the cache."""
    at_once = max(1, _TOKENS_IN_CACHE // max(1, matrix.size(-1)))
    return [slice(start, start + at_once) for start in range(0, len(matrix), at_once)]


def _gae(
    rewards: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages before whitening, and returns, (B, R); `valid` (B, R) is bool."""
    num_rows, length = values.shape
    # Each row's valid tokens move to the left, W positions wide: a multiple of the block, at least R + 1. Position R
    # takes what is not valid and is then cleared, so that zeros follow the last token and lie where masked tokens read.
    width = (length // _GAE_BLOCK + 1) * _GAE_BLOCK
    position = torch.where(valid, valid.cumsum(-1) - 1, length)

    def left_aligned(columns: torch.Tensor) -> torch.Tensor:
        aligned = columns.new_zeros(num_rows, width).scatter_(1, position, columns)
        aligned[:, length] = 0.0
        return aligned

    values_BW = left_aligned(values)
    delta_BW = left_aligned(rewards).sub_(values_BW)
    delta_BW[:, :-1].add_(values_BW[:, 1:], alpha=gamma)
    advantages_BW = discounted_sums(delta_BW, gamma * lam)
    returns_BW = values_BW.add_(advantages_BW)
    return advantages_BW.gather(1, position), returns_BW.gather(1, position)


def discounted_sums(terms: torch.Tensor, discount: float) -> torch.Tensor:
    """S_t = sum over j >= t of discount^(j - t) terms_j along each row of terms (B, W); W divides into blocks of 64.

    Within a block that is a product with the triangular matrix of the powers; from block to block only the first sum is
    carried: S_t += discount^(distance to the next block) S_(first of the next block). The powers are at most the ones
    the sum itself contains, so nothing overflows that the recurrence S_t = terms_t + discount S_(t+1) would not.
    """
    steps = torch.arange(_GAE_BLOCK + 1, dtype=torch.float64, device=terms.device)
    powers = (discount**steps).to(terms.dtype)  # 0^0 = 1
    distance = (steps[:-1].unsqueeze(1) - steps[:-1]).long()
    sums = terms.view(len(terms), -1, _GAE_BLOCK) @ powers[distance.clamp(min=0)].tril()
    for block in reversed(range(sums.size(1) - 1)):
        sums[:, block].addr_(sums[:, block + 1, 0], powers[1:].flip(0))
    return sums.view_as(terms)


def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantage of the response's total reward (GRPO, arXiv 2402.03300).

    score_i = sum of row i's rewards; A_i = (score_i - mean) / (std + epsilon), with the mean and the unbiased std over
    the scored rows of the same prompt; every token of row i gets A_i. Without the std: Dr. GRPO (arXiv 2503.20783).

    A row without any response token was skipped: it does not enter its group's statistics and its advantage is 0.
    A group that consists of one row has no peers by design: mean 0, std 1, so its advantage is the score.
    A group of several rows of which only one is scored has lost its baseline: that row's advantage is 0, because its
    raw score would be on another scale than the rest of the batch.

    Args:
        token_level_rewards: (B, R) float.
        response_mask: (B, R) bool or 0/1.
        index: (B,) hashable objects, equal for the rows of one prompt.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False leaves the division out.

    Returns:
        The advantages (B, R), 0 where the mask is 0, twice: GRPO has no separate returns.
    """
    with torch.no_grad():
        valid = response_mask.bool()
        # float64: in a group of equal scores the mean is then exact and each advantage exactly 0; in float32 the
        # rounding error of the mean, divided by epsilon, would become a visible advantage.
        scores = token_level_rewards.new_zeros(len(valid), dtype=torch.float64)
        for rows in _few_rows(valid):
            scores[rows] = zero_masked(token_level_rewards[rows], valid[rows]).sum(dim=-1)
        scored = valid.any(dim=-1)
        codes: dict[Hashable, int] = {}
        group = torch.tensor(
            [codes.setdefault(key, len(codes)) for key in index], dtype=torch.long, device=scores.device
        )

        def group_sum(row_values: torch.Tensor) -> torch.Tensor:
            """Sum of row_values (B,) over the scored rows of each row's group, (B,)."""
            totals = scores.new_zeros(len(codes)).index_add_(0, group, zero_masked(row_values, scored))
            return totals[group]

        num_scored = group_sum(torch.ones_like(scores))
        num_rows = torch.bincount(group, minlength=len(codes))[group]
        deviation = scores - group_sum(scores) / num_scored.clamp(min=1)
        std = torch.sqrt(group_sum(deviation**2) / (num_scored - 1).clamp(min=1))
        deviation = torch.where(num_rows == 1, scores, deviation)
        std = torch.where(num_rows == 1, 1.0, std)
        row_advantages = deviation / (std + epsilon) if norm_adv_by_std_in_grpo else deviation
        advantages = zero_masked(row_advantages.to(token_level_rewards.dtype).unsqueeze(-1), valid)
    return advantages, advantages


@register_adv_est("gae")
def estimate_gae(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_gae_advantage_return` on the inputs; reads values, gamma, lam."""
    if inputs.values is None:
        raise ValueError("advantage estimator 'gae' needs values, got None: enable the critic or choose 'grpo'")
    return compute_gae_advantage_return(
        inputs.token_level_rewards, inputs.values, inputs.response_mask, inputs.gamma, inputs.lam
    )


@register_adv_est("grpo")
def estimate_grpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_grpo_outcome_advantage` on the inputs; reads index, norm_adv_by_std_in_grpo."""
    if inputs.index is None:
        raise ValueError("advantage estimator 'grpo' needs index, got None: pass the prompt id (uid) of each row")
    return compute_grpo_outcome_advantage(
        inputs.token_level_rewards,
        inputs.response_mask,
        inputs.index,
        norm_adv_by_std_in_grpo=inputs.norm_adv_by_std_in_grpo,
    )
