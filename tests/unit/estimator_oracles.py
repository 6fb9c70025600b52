"""Advantage estimators in float64 NumPy, row by row from the papers' formulas, and batches to try
them on.

B rows, R padded response length. Nothing here is shared with the package.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Batch:
    rewards: np.ndarray
    """(B, R) float32, NaN where the mask is 0"""
    mask: np.ndarray
    """(B, R) bool, with holes"""
    index: np.ndarray
    """(B,) object"""

    def columns(self, seed: int) -> dict[str, np.ndarray]:
        """(B, R) float32: log-probabilities of the tokens, sums of squared probabilities,
        importance weights."""
        rng = np.random.default_rng(seed)
        probability = rng.uniform(0.05, 1.0, self.mask.shape)
        columns = {
            "old_log_probs": np.log(probability),
            "sum_pi_squared": probability**2
            + rng.uniform(0, 1, self.mask.shape) * (1 - probability) ** 2,
            "rollout_is_weights": rng.uniform(0.3, 2.0, self.mask.shape),
        }
        return {
            name: np.where(self.mask, column, np.nan).astype(np.float32)
            for name, column in columns.items()
        }


def random_batch(seed: int, length: int = 6, least: float = -2.0, outcome: bool = False) -> Batch:
    """Shuffled groups: of 4 (twice) and 3 rows, of 4 equal scores, of one, and of 3 of which one is
    scored.

    Args:
        least: no score is below it if it is 0.
        outcome: rewards on the last response token alone.
    """
    rng = np.random.default_rng(seed)
    index = np.array([*"aaaabbbbcccddddeffghhh"], dtype=object)
    mask = rng.random((len(index), length)) < 0.7
    mask[:, 0] |= ~mask.any(-1)  # each has a token
    # Skipped: a row of a, one of c, all but the last of h; ff and g stay whole
    mask[[1, 9, 19, 20]] = False
    # Sums of multiples of 1/1024 are exact: scores are equal in float32 where they are in float64.
    rewards = (np.round(1024 * rng.uniform(least, 2.0, mask.shape)) / 1024).astype(np.float32)
    if least == 0:
        rewards[rng.random(len(index)) < 0.5] = 0  # failures
    last = mask & (mask[:, ::-1].cumsum(1)[:, ::-1] == 1)
    equal = index == "d"
    rewards[equal] = np.where(last[equal], np.float32(0.1), 0)
    if outcome:
        rewards = np.where(last, rewards, 0).astype(np.float32)
    order = rng.permutation(len(index))
    return Batch(
        np.where(mask, rewards, np.nan).astype(np.float32)[order], mask[order], index[order]
    )


def score(batch: Batch, row: int) -> float:
    return float(batch.rewards[row, batch.mask[row]].astype(np.float64).sum())


def group_of(batch: Batch, row: int) -> list[int]:
    return [other for other in range(len(batch.index)) if batch.index[other] == batch.index[row]]


def is_scored(batch: Batch, row: int) -> bool:
    return bool(batch.mask[row].any())


def has_baseline(batch: Batch, row: int) -> bool:
    group = group_of(batch, row)
    return is_scored(batch, row) and (
        len(group) == 1 or sum(is_scored(batch, other) for other in group) > 1
    )


def outcome_advantages(batch: Batch, advantage_of) -> np.ndarray:
    """(B, R): `advantage_of(score, scores of the others, number of tokens, numbers of tokens of the
    others)` where the row can be compared; its score in a group of one; 0 where the others were
    skipped."""
    advantages = np.zeros(batch.mask.shape)
    for row in range(len(batch.mask)):
        if not has_baseline(batch, row):
            continue
        others = [
            other for other in group_of(batch, row) if other != row and is_scored(batch, other)
        ]
        if others:
            lengths = [int(batch.mask[other].sum()) for other in others]
            value = advantage_of(
                score(batch, row),
                [score(batch, other) for other in others],
                int(batch.mask[row].sum()),
                lengths,
            )
        else:
            value = score(batch, row)
        advantages[row, batch.mask[row]] = value
    return advantages


def dr_grpo(own, others, own_length, lengths):
    return own - np.mean([own, *others])


def grpo(own, others, own_length, lengths):
    return (own - np.mean([own, *others])) / (np.std([own, *others], ddof=1) + 1e-6)


def rloo(own, others, own_length, lengths):
    return own - np.mean(others)


def opo(own, others, own_length, lengths):
    return own - np.dot([own, *others], [own_length, *lengths]) / sum([own_length, *lengths])


def pass_at_k(own, others, own_length, lengths):
    return max([own, *others]) - max(others)


def pass_at_k_over_std(own, others, own_length, lengths):
    return pass_at_k(own, others, own_length, lengths) / (np.std([own, *others], ddof=1) + 1e-6)


def max_rl(own, others, own_length, lengths):
    mean = np.mean([own, *others])
    return (own - mean) / mean if mean > 0 else 0.0


def gpg(batch: Batch) -> np.ndarray:
    advantages = outcome_advantages(batch, dr_grpo)
    scored = [row for row in range(len(batch.mask)) if is_scored(batch, row)]
    with_gradient = [
        row
        for row in scored
        if any(np.abs(advantages[other]).max() > 1e-9 for other in group_of(batch, row))
    ]
    return advantages * len(scored) / len(with_gradient)


def whitened(values: np.ndarray, batch: Batch) -> np.ndarray:
    """`values` (B, R) whitened over the tokens of the rows with a baseline, 0 elsewhere."""
    compared = batch.mask & np.array([[has_baseline(batch, row)] for row in range(len(batch.mask))])
    selected = values[compared]
    return np.where(
        compared, (values - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8), 0.0
    )


def discounted_returns(batch: Batch, gamma: float) -> np.ndarray:
    returns = np.zeros(batch.mask.shape)
    for row in range(len(batch.mask)):
        tokens = np.flatnonzero(batch.mask[row])
        for n, token in enumerate(tokens):
            later = batch.rewards[row, tokens[n:]].astype(np.float64)
            returns[row, token] = np.dot(later, gamma ** np.arange(len(later)))
    return returns


def optimal_token_baseline(
    batch: Batch, columns: dict, positions: np.ndarray, zero_tail: bool
) -> np.ndarray:
    """Advantages (B, R); tokens of a group are compared where `positions` (B, R) are equal.
    `columns` may do without importance weights."""
    returns = discounted_returns(batch, 1.0)
    advantages, weights = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    for row in range(len(batch.mask)):
        total = 0.0
        for token in np.flatnonzero(batch.mask[row]):
            pi = np.exp(np.float64(columns["old_log_probs"][row, token]))
            rho = (
                np.float64(columns["rollout_is_weights"][row, token])
                if "rollout_is_weights" in columns
                else 1.0
            )
            total += (1 - 2 * pi + np.float64(columns["sum_pi_squared"][row, token])) * rho**2
            weights[row, token] = total
    for row in range(len(batch.mask)):
        if not has_baseline(batch, row):
            continue
        group = group_of(batch, row)
        for token in np.flatnonzero(batch.mask[row]):
            here = [
                (weights[other, t] + 1e-8, returns[other, t])
                for other in group
                for t in np.flatnonzero(batch.mask[other])
                if positions[other, t] == positions[row, token]
            ]
            if len(here) > 1:
                baseline = sum(w * g for w, g in here) / sum(w for w, _ in here)
            else:
                baseline = 0.0 if zero_tail or len(group) == 1 else returns[row, token]
            advantages[row, token] = returns[row, token] - baseline
    return advantages
