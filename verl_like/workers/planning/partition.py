"""Divides rows into micro-batches by a limit of tokens, and among ranks into shares of equal work.

These are plain functions of lengths, without torch or processes, so that every rank and the driver
can compute the same plan.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PretrainedConfig

from verl_like.workers.config.roles import ActorConfig, CriticConfig
from verl_like.workers.config.rollout import LogProbConfig

# Legend: B rows of a batch.

_FULL = 0.98
"""If micro-batches are at least this full on average, those of first-fit decreasing are used."""
_TOLERANCE = 2e-4
"""Shares are even enough if the largest one is at most this far above the mean."""
_ROUNDS = 40
"""The largest number of rounds of exchanges."""
_PATIENCE = 10
"""The number of rounds without a gain after which exchanges end."""
_RUNS_OF_SHARE = 4
"""About how many runs of samples with the same prompt a rank's share consists of at least."""
_WIDTH = 128
"""About how many rows of a share one round considers. Of a larger share it is an even sample, which
differs in each round."""


@dataclass(frozen=True)
class MicroBatching:
    """How a rank's rows are divided into micro-batches: by their number or by their tokens.

    A micro-batch is one pass of the model.
    """

    num_rows: int
    """The number of samples of a micro-batch, unless `by_tokens`. A sample can be several rows."""
    max_tokens: int
    """The largest number of tokens of a micro-batch, without padding, for each of the ranks that
    share it."""
    by_tokens: bool
    """If True, `max_tokens` is the limit instead of `num_rows`."""


def log_prob_micro_batching(part: LogProbConfig) -> MicroBatching:
    """Returns how micro-batches are made to compute log-probabilities."""
    return MicroBatching(
        part.log_prob_micro_batch_size_per_gpu,
        part.log_prob_max_token_len_per_gpu,
        part.log_prob_use_dynamic_bsz,
    )


def update_micro_batching(settings: ActorConfig | CriticConfig) -> MicroBatching:
    """Returns how micro-batches are made to update the actor or the critic."""
    return MicroBatching(
        settings.ppo_micro_batch_size_per_gpu,
        settings.ppo_max_token_len_per_gpu,
        settings.use_dynamic_bsz,
    )


def pack_into_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, at_least: int = 1
) -> list[list[int]]:
    """Divides rows into micro-batches, and returns the row indices of each, the longest one first.

    There are as few micro-batches as first-fit decreasing needs (Johnson 1973): at most 11/9 of the
    least possible number, plus 6/9 (Dosa 2007). They have about the same number of tokens if the
    limit allows it.

    Args:
        lengths: (B,) the number of tokens of each row, all positive.
        max_tokens: the largest number of tokens of a micro-batch. A longer row raises ValueError.
        at_least: the least number of micro-batches to make, if there are as many rows. Ranks that
            compute together give the largest number that any of them needs.
    """
    _require_room(lengths, max_tokens)

    def num_tokens(micro_batch: list[int]) -> int:
        return sum(lengths[row] for row in micro_batch)

    num_rows = len(lengths)
    micro_batches = _first_fit_decreasing(lengths, max_tokens)
    count = max(len(micro_batches), at_least)
    count = min(count, num_rows)
    room = count * max_tokens
    is_full = sum(lengths) >= _FULL * room
    if len(micro_batches) < num_rows and not is_full:
        even = _longest_first(lengths, count)
        largest_even = max(map(num_tokens, even))
        if largest_even <= max_tokens:
            micro_batches = even
    while len(micro_batches) < count:
        largest = max(micro_batches, key=len)
        num_moved = len(largest) // 2
        half = [largest.pop() for _ in range(num_moved)]
        micro_batches.append(half)
    return sorted(micro_batches, key=num_tokens, reverse=True)


def pack_prompts(
    lengths: Sequence[int], prompts: Sequence[int], max_tokens: int, *, at_least: int = 1
) -> list[list[int]]:
    """Does what `pack_into_micro_batches` does with runs of rows that have the same prompt.

    Rows of a run are in the same micro-batch. Tokens of a prompt count for each row, so a run that
    is longer than a micro-batch is divided.

    Args:
        lengths: (B,) the number of tokens of each row, all positive.
        prompts: (B,) the prompt of each row, as any number.
        max_tokens: the largest number of tokens of a micro-batch.
        at_least: the least number of micro-batches to make, if there are as many runs.
    """
    _require_room(lengths, max_tokens)
    runs = runs_of_prompts(prompts, lengths, max_tokens)
    lengths_of_runs = [sum(lengths[row] for row in run) for run in runs]
    micro_batches = []
    for numbers in pack_into_micro_batches(lengths_of_runs, max_tokens, at_least=at_least):
        rows = []
        for number in numbers:
            rows += runs[number].tolist()
        micro_batches.append(rows)
    return micro_batches


def _require_room(lengths: Sequence[int], max_tokens: int) -> None:
    """Raises ValueError if a row is longer than a micro-batch."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"row {lengths.index(longest)} has {longest} tokens, more than the {max_tokens} of a "
            "micro-batch; raise the *_max_token_len_per_gpu of this pass to at least the longest "
            "sequence."
        )


def balance(work: Sequence[float] | np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Divides rows into shares of about the same work, and returns the row indices of each.

    The indices are int64 and ascending. No share has more than B / num_parts rows, rounded up.

    Two methods make a first division: the differencing method (Karmarkar & Karp 1982), on groups of
    `num_parts` rows, and the longest first (Graham 1969). The better one is improved by exchanges
    of rows between heavy and light shares.

    Args:
        work: (B,) the work of each row, in any unit, not negative.
        num_parts: the number of shares.
    """
    num_rows = len(work)
    if not num_rows:
        no_rows = np.arange(0)
        return [no_rows] * num_parts
    # Rows without work fill the shares up to the same number of rows, and are left out in the end.
    num_fillers = -num_rows % num_parts
    fillers = np.zeros(num_fillers)
    work_B = np.concatenate([work, fillers])
    rows_per_part = len(work_B) // num_parts
    parts = _longest_first(work_B.tolist(), num_parts, rows_per_part)
    longest_first = np.array(parts)
    differencing = _differencing(work_B, num_parts)
    starts = [differencing, longest_first]

    def largest_load(table: np.ndarray) -> float:
        loads = work_B[table].sum(1)
        return loads.max()

    shares = min(starts, key=largest_load)
    _exchange(shares, work_B)
    shares.sort(axis=1)
    return [rows[rows < num_rows] for rows in shares]


def runs_of_prompts(
    prompts_S: Sequence[int] | np.ndarray, sizes_S: Sequence[int] | np.ndarray, largest: int
) -> list[np.ndarray]:
    """Divides samples into runs of consecutive ones with the same prompt, and returns the int64
    numbers of the samples of each.

    Args:
        prompts_S: the prompt of each sample, as any number.
        sizes_S: the size of each sample, in any unit.
        largest: the largest size of a run of several samples. Longer runs are divided.
    """
    runs: list[list[int]] = []
    size_of_run = 0
    for sample, size in enumerate(sizes_S):
        has_same_prompt = bool(runs) and prompts_S[sample] == prompts_S[sample - 1]
        size_of_run += size
        if not has_same_prompt or size_of_run > largest:
            runs.append([])
            size_of_run = size
        runs[-1].append(sample)
    return [np.array(run) for run in runs]


def rank_shares(
    num_samples: int,
    num_of_step: int,
    num_ranks: int,
    work_S: Sequence[float] | np.ndarray | None = None,
    prompts_S: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Divides the samples of each mini-batch among ranks.

    Returns the int64 numbers of each rank's samples, one mini-batch after the other. With n =
    `num_of_step`, mini-batch i has samples i * n to (i + 1) * n - 1 of the batch, whatever the
    number of ranks. They are divided by `balance` if their work is given, and otherwise into
    consecutive parts. No rank gets more of them than the mean, rounded up.

    With `prompts_S`, the prompt of each sample as a number, `balance` divides runs of samples with
    the same prompt instead of samples. No rank gets more runs than their mean, rounded up. A run
    has at most a quarter of the mean number of samples of a rank, so that work can be about equal.
    """
    no_samples = np.arange(0)
    of_ranks = [[no_samples] for _ in range(num_ranks)]
    for first in range(0, num_samples, num_of_step):
        end = min(first + num_of_step, num_samples)
        if work_S is None:
            samples = np.arange(first, end)
            shares = np.array_split(samples, num_ranks)
        else:
            work_of_step = np.asarray(work_S[first:end])
            if prompts_S is None:
                balanced = balance(work_of_step, num_ranks)
            else:
                balanced = _balanced_runs(work_of_step, prompts_S[first:end], num_ranks)
            shares = [first + share for share in balanced]
        for of_rank, share in zip(of_ranks, shares, strict=True):
            of_rank.append(share)
    return [np.concatenate(shares) for shares in of_ranks]


def _balanced_runs(work_S: np.ndarray, prompts_S: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Does what `balance` does with runs of samples with the same prompt."""
    num_samples = len(work_S)
    largest = num_samples // (_RUNS_OF_SHARE * num_ranks)
    runs = runs_of_prompts(prompts_S, [1] * num_samples, max(1, largest))
    work_of_runs = [work_S[run].sum() for run in runs]
    no_samples = np.arange(0)
    shares = []
    for numbers in balance(work_of_runs, num_ranks):
        chosen = [runs[number] for number in numbers]
        shares.append(np.concatenate([no_samples, *chosen]))
    return shares


def num_groups(size: int, total: int, of: str, *, key: str) -> int:
    """Returns the number of groups of `size` in `total`.

    Raises ValueError if `size` does not divide `total`. For the message `of` says what is divided,
    and `key` is the setting of `size`.
    """
    if total % size:
        raise ValueError(f"{key}={size} does not divide the {total} {of}; choose a divisor.")
    return total // size


def require_shares_of_heads(hf_config: PretrainedConfig, size: int, key: str) -> None:
    """Raises ValueError if the model's attention heads cannot be divided equally among `size`
    ranks."""
    heads = hf_config.get_text_config().num_attention_heads
    what = "attention heads of the model, of which every rank takes a share"
    num_groups(size, heads, what, key=key)


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each row, the longest first, into the first bin that has room for it.

    This fills one bin after the other: a bin gets the longest remaining row that fits, again and
    again. The bins are the same, but each row costs only a binary search.
    """
    length_of = lengths.__getitem__
    all_rows = range(len(lengths))
    shortest_first = sorted(all_rows, key=length_of)
    bins = []
    while shortest_first:
        rows = []
        room = capacity
        while num_fitting := bisect_right(shortest_first, room, key=length_of):
            row = shortest_first.pop(num_fitting - 1)
            room -= lengths[row]
            rows.append(row)
        bins.append(rows)
    return bins


def _longest_first(
    work: Sequence[float], num_parts: int, max_rows: int | None = None
) -> list[list[int]]:
    """Gives each row, the longest first, to the part with the least work so far.

    A part with `max_rows` rows gets no more.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts)]  # a heap
    rows = range(len(work))
    longest_first = sorted(rows, key=work.__getitem__, reverse=True)
    for row in longest_first:
        load, number = loads[0]
        part = parts[number]
        part.append(row)
        if len(part) == max_rows:
            heapq.heappop(loads)
        else:
            new_load = load + work[row]
            heapq.heapreplace(loads, (new_load, number))
    return parts


def _differencing(work_B: np.ndarray, num_parts: int) -> np.ndarray:
    """Divides rows into parts by the differencing method: a table (parts, rows of a part).

    The longest `num_parts` rows are a group, then the next ones, and so on, and each row of a group
    is one part of it. Then the two groups whose parts differ most are joined, until one is left:
    the heaviest part of one group and the lightest part of the other become one part.
    """
    groups = []
    longest_first = np.argsort(-work_B, kind="stable")
    rows_of_groups = longest_first.reshape(-1, num_parts)
    for number, rows in enumerate(rows_of_groups):
        loads = work_B[rows]  # the work of each part, the heaviest first
        difference = loads[-1] - loads[0]  # negative, so that the heap has the largest one first
        group = (difference, number, loads, rows[:, None])
        groups.append(group)
    heapq.heapify(groups)
    while len(groups) > 1:
        _, number, loads, rows = heapq.heappop(groups)
        _, _, other_loads, other_rows = heapq.heappop(groups)
        loads = loads + other_loads[::-1]
        joined = np.concatenate([rows, other_rows[::-1]], axis=1)
        heaviest_first = np.argsort(-loads, kind="stable")
        loads = loads[heaviest_first]
        rows = joined[heaviest_first]
        difference = loads[-1] - loads[0]
        group = (difference, number, loads, rows)
        heapq.heappush(groups, group)
    _, _, _, table = groups[0]
    return table


def _exchange(shares: np.ndarray, work_B: np.ndarray) -> None:
    """Makes the work of `shares`, a table of row numbers, more even, in place.

    Each round pairs each share of the heavier half with one of the lighter half. In the first round
    these are the heaviest and the lightest, and in later rounds the pairs are others. A pair
    exchanges the two rows that bring it closest to equal work.
    """
    loads = work_B[shares].sum(1)
    half = len(shares) // 2
    best = loads.max()
    stale = 0
    stride = 1 + shares.shape[1] // _WIDTH
    for number in range(_ROUNDS):
        even_enough = (1 + _TOLERANCE) * loads.mean()
        is_even = loads.max() <= even_enough
        if is_even or stale == _PATIENCE:
            return
        heaviest_first = np.argsort(-loads, kind="stable")
        lightest_first = heaviest_first[::-1]
        heavy = heaviest_first[:half]
        light = np.roll(lightest_first[:half], -number)
        first = number % stride
        heavy_rows = shares[heavy, first::stride]
        light_rows = shares[light, first::stride]
        heavy_work = work_B[heavy_rows]
        light_work = work_B[light_rows]
        moved = heavy_work[:, :, None] - light_work[:, None, :]  # by an exchange of two rows
        gap = loads[heavy] - loads[light]
        half_gap = gap[:, None, None] / 2
        distance = np.abs(moved - half_gap)
        nearest = distance.reshape(half, -1).argmin(1)
        mine, theirs = np.divmod(nearest, moved.shape[2])
        moved = moved[np.arange(half), mine, theirs]
        helps = (moved > 0) & (moved < gap)
        heavy = heavy[helps]
        light = light[helps]
        moved = moved[helps]
        mine = mine[helps]
        theirs = theirs[helps]
        mine = mine * stride + first
        theirs = theirs * stride + first
        given = shares[heavy, mine]
        shares[heavy, mine] = shares[light, theirs]
        shares[light, theirs] = given
        loads[heavy] -= moved
        loads[light] += moved
        stale += 1
        largest = loads.max()
        if largest < best:
            best = largest
            stale = 0
