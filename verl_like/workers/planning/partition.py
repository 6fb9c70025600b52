"""Plans who computes what: rows into micro-batches by a token budget, and work into equal shares.

Plain functions of lengths, without torch or processes, so that every rank and the driver can plan
alike.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PretrainedConfig

from verl_like.workers.config.rollout import LogProbConfig

# Legend: B rows of a batch.

_FULL = 0.98
"""Micro-batches this full on average stay as first-fit decreasing fills them."""
_TOLERANCE = 2e-4
"""Shares are even enough when the greatest is at most this far above the mean."""
_ROUNDS = 40
_PATIENCE = 10
"""Most rounds of exchanges, and rounds without a gain after which they end."""
_WIDTH = 128
"""Rows of a share that one round looks at; of a larger share an even sample, another one each
round."""


@dataclass(frozen=True)
class MicroBatching:
    """How a rank's rows become micro-batches, each one pass of the model: by their number or by
    their tokens."""

    num_rows: int
    """Rows of a micro-batch, unless `by_tokens`."""
    max_tokens: int
    """Most tokens of a micro-batch without padding, for each of the ranks that share it."""
    by_tokens: bool
    """Whether `max_tokens` is the limit, not `num_rows`."""


def log_prob_micro_batching(part: LogProbConfig) -> MicroBatching:
    """The micro-batches in which log-probabilities are computed."""
    return MicroBatching(
        part.log_prob_micro_batch_size_per_gpu,
        part.log_prob_max_token_len_per_gpu,
        part.log_prob_use_dynamic_bsz,
    )


def pack_into_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, at_least: int = 1
) -> list[list[int]]:
    """The row indices of each micro-batch, the one with the most tokens first: as few as first-fit
    decreasing needs, of even size where that fits.

    First-fit decreasing (Johnson 1973) needs at most 11/9 of the least possible number, plus 6/9
    (Dosa 2007).

    Args:
        lengths: (B,) tokens of each row, all positive.
        max_tokens: most tokens of a micro-batch; a longer row raises ValueError.
        at_least: how many micro-batches to make, where there are as many rows; ranks that step
            together give the largest number that any of them needs.
    """
    lengths_B = np.asarray(lengths, dtype=np.int64)
    if (lengths_B > max_tokens).any():
        longest = int(lengths_B.argmax())
        raise ValueError(
            f"row {longest} has {lengths_B[longest]} tokens, more than the {max_tokens} of a "
            "micro-batch; raise the *_max_token_len_per_gpu of this pass to at least the longest "
            "sequence."
        )
    tokens: list[int] = lengths_B.tolist()
    micro_batches = _first_fit_decreasing(tokens, max_tokens)
    count = min(max(len(micro_batches), at_least), len(tokens))
    if len(micro_batches) < len(tokens) and lengths_B.sum() < _FULL * count * max_tokens:
        even = _longest_first(tokens, count)
        if max(_totals(even, tokens)) <= max_tokens:
            micro_batches = even
    while len(micro_batches) < count:
        largest = max(micro_batches, key=len)
        micro_batches.append([largest.pop() for _ in range(len(largest) // 2)])
    heaviest_first = np.argsort([-total for total in _totals(micro_batches, tokens)], kind="stable")
    return [micro_batches[index] for index in heaviest_first.tolist()]


def balance(work: Sequence[float] | np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Shares of about the same work, none of more than B / num_parts rows, rounded up: int64 row
    indices, ascending.

    The better of two starts, the differencing method (Karmarkar & Karp 1982) on groups of
    `num_parts` rows and the longest first (Graham 1969), then exchanges of rows between heavy and
    light shares.

    Args:
        work: (B,) work of each row, in any unit, not negative.
        num_parts: shares to make; where they do not divide B, rows without work fill up, and are
            left out in the end.
    """
    num_rows = len(work)
    num_fillers = -len(work) % num_parts
    if not num_rows:
        return [np.arange(0)] * num_parts
    work_B = np.concatenate([np.asarray(work, dtype=np.float64), np.zeros(num_fillers)])
    longest_first = _longest_first(work_B.tolist(), num_parts, len(work_B) // num_parts)
    starts = [_differencing(work_B, num_parts), np.array(longest_first)]
    shares = min(starts, key=lambda table: work_B[table].sum(1).max())
    _exchange(shares, work_B)
    return [rows[rows < num_rows] for rows in np.sort(shares, axis=1)]


def rank_shares(
    num_rows: int,
    num_mini_batch_rows: int,
    num_ranks: int,
    work_B: Sequence[float] | np.ndarray | None = None,
) -> list[np.ndarray]:
    """The rows of each rank, one mini-batch after the other: int64 row indices.

    With n = `num_mini_batch_rows`, mini-batch i is rows i * n to (i + 1) * n of the batch, for
    every number of ranks. Of each, no rank gets more rows than the mean rounded up: as they come
    or, where their work is given, as `balance` divides it.
    """
    of_ranks: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    for first in range(0, num_rows, num_mini_batch_rows):
        rows = np.arange(first, min(first + num_mini_batch_rows, num_rows))
        if work_B is None:
            shares = np.array_split(rows, num_ranks)
        else:
            shares = [first + share for share in balance(np.asarray(work_B)[rows], num_ranks)]
        for of_rank, share in zip(of_ranks, shares, strict=True):
            of_rank.append(share)
    return [np.concatenate([np.arange(0), *shares]) for shares in of_ranks]


def num_groups(size: int, total: int, of: str, *, key: str) -> int:
    """How many groups of `size` make up `total`, or ValueError; `of` says among what, `key` names
    its setting."""
    if total % size:
        raise ValueError(f"{key}={size} does not divide the {total} {of}; choose a divisor.")
    return total // size


def require_shares_of_heads(hf_config: PretrainedConfig, size: int, key: str) -> None:
    """Raises ValueError unless each of `size` ranks can take as many attention heads of the model
    as the others."""
    heads = hf_config.get_text_config().num_attention_heads
    num_groups(
        size, heads, "attention heads of the model, of which every rank takes a share", key=key
    )


def _totals(parts: list[list[int]], work: Sequence[float]) -> list[float]:
    return [sum(map(work.__getitem__, rows)) for rows in parts]


def _first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Bins by the rule "longest first, each into the first bin that has room", filled one bin after
    the other.

    A bin gets, again and again, the longest row left that fits: the same bins, at a binary search a
    row.
    """
    num_rows = len(lengths)
    # One number for length and row
    left = sorted(length * num_rows + row for row, length in enumerate(lengths))
    bins: list[list[int]] = []
    while left:
        rows = []
        room = capacity
        while fitting := bisect_left(left, (room + 1) * num_rows):
            length, row = divmod(left.pop(fitting - 1), num_rows)
            room -= length
            rows.append(row)
        bins.append(rows)
    return bins


def _longest_first(
    work: Sequence[float], num_parts: int, max_rows: int | None = None
) -> list[list[int]]:
    """Each row, the longest first, to the part with the least work so far that has fewer than
    `max_rows` rows."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts)]  # a heap
    for row in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        load, part = loads[0]
        parts[part].append(row)
        if len(parts[part]) == max_rows:
            heapq.heappop(loads)
        else:
            heapq.heapreplace(loads, (load + work[row], part))
    return parts


def _differencing(work_B: np.ndarray, num_parts: int) -> np.ndarray:
    """(parts, rows per part): of each group of rows that are next in size one goes to each part.

    The two groups whose parts differ most are joined, the heaviest part of one with the lightest of
    the other, until one is left.
    """
    groups = []
    for number, rows in enumerate(np.argsort(-work_B, kind="stable").reshape(-1, num_parts)):
        loads = work_B[rows]  # of the parts, the heaviest first
        groups.append((loads[-1] - loads[0], number, loads, rows[:, None]))
    heapq.heapify(groups)
    while len(groups) > 1:
        _, number, loads, rows = heapq.heappop(groups)
        _, _, other_loads, other_rows = heapq.heappop(groups)
        loads = loads + other_loads[::-1]
        heaviest_first = np.argsort(-loads, kind="stable")
        loads = loads[heaviest_first]
        rows = np.concatenate([rows, other_rows[::-1]], axis=1)[heaviest_first]
        heapq.heappush(groups, (loads[-1] - loads[0], number, loads, rows))
    return groups[0][3]


def _exchange(shares: np.ndarray, work_B: np.ndarray) -> None:
    """Makes the work of `shares`, a table of row numbers, more even, in place.

    Each round pairs the heavier half of the shares with the lighter half, the heaviest with the
    lightest in the first and with another one in each later round. A pair swaps the two rows that
    bring it closest to equal work.
    """
    loads = work_B[shares].sum(1)
    half = len(shares) // 2
    best = loads.max()
    stale = 0
    stride = 1 + shares.shape[1] // _WIDTH
    for number in range(_ROUNDS):
        if loads.max() <= (1 + _TOLERANCE) * loads.mean() or stale == _PATIENCE:
            return
        heaviest_first = np.argsort(-loads, kind="stable")
        heavy = heaviest_first[:half]
        light = np.roll(heaviest_first[::-1][:half], -number)
        looked_at = slice(number % stride, None, stride)
        gap = loads[heavy] - loads[light]
        moved = (
            work_B[shares[heavy, looked_at]][:, :, None]
            - work_B[shares[light, looked_at]][:, None, :]
        )
        nearest = np.abs(moved - gap[:, None, None] / 2).reshape(half, -1).argmin(1)
        mine, theirs = np.divmod(nearest, moved.shape[2])
        moved = moved[np.arange(half), mine, theirs]
        helps = (moved > 0) & (moved < gap)
        heavy = heavy[helps]
        light = light[helps]
        moved = moved[helps]
        mine, theirs = (column[helps] * stride + looked_at.start for column in (mine, theirs))
        shares[heavy, mine], shares[light, theirs] = shares[light, theirs], shares[heavy, mine]
        loads[heavy] -= moved
        loads[light] += moved
        stale = 0 if loads.max() < best else stale + 1
        best = min(best, loads.max())
