"""Micro-batches cover every row within their budget; shares of work are even; mini-batches fit any
number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.workers.planning.partition import balance, pack_into_micro_batches, rank_shares

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def first_fit_decreasing(lengths, capacity):
    """The rule as it is told: each length, the longest first, into the first bin with room."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = next((index for index, left in enumerate(room) if left >= length), None)
        if fitting is None:
            room.append(capacity - length)
        else:
            room[fitting] -= length
    return len(room)


def rows_of(parts):
    return sorted(row for rows in parts for row in rows)


@settings(deadline=None)
@given(LENGTHS, st.integers(100, 400), st.integers(1, 70))
def test_micro_batches_hold_every_row_once_within_the_budget_in_no_more_bins_than_first_fit(
    lengths, budget, at_least
):
    micro_batches = pack_into_micro_batches(lengths, budget, at_least=at_least)
    tokens = [sum(lengths[row] for row in rows) for rows in micro_batches]
    assert rows_of(micro_batches) == list(range(len(lengths)))
    assert all(rows for rows in micro_batches) and max(tokens) <= budget
    assert len(micro_batches) == min(
        max(first_fit_decreasing(lengths, budget), at_least), len(lengths)
    )
    assert tokens == sorted(tokens, reverse=True)


def packed_lengths(lengths, budget, at_least=1):
    return [
        sorted(lengths[row] for row in rows)
        for rows in pack_into_micro_batches(lengths, budget, at_least=at_least)
    ]


def test_micro_batches_are_even_where_the_budget_leaves_room():
    # First fit would fill three rows of 4 into one and leave the last alone.
    assert packed_lengths([4, 4, 4, 4], 12) == [[4, 4], [4, 4]]


def test_where_even_micro_batches_would_break_the_budget_first_fit_fills_them():
    # The longest first to the emptiest: 3 + 2 + 2 = 7 in the first.
    assert packed_lengths([3, 2, 3, 2, 2], 6) == [[3, 3], [2, 2, 2]]


def test_one_more_micro_batch_than_first_fit_needs_keeps_the_budget_too():
    # Shared out evenly over 8, the longest first, one of them would have 38 + 34 + 29 = 101.
    lengths = [59, 53, 52, 49, 42, 42, 38, 38, 34, 34, 34, 34, 34, 33, 31, 30, 29]
    assert len(packed_lengths(lengths, 100)) == 7
    packed = packed_lengths(lengths, 100, at_least=8)
    assert len(packed) == 8 and max(map(sum, packed)) <= 100


def test_more_micro_batches_can_be_asked_for_up_to_one_a_row():
    assert packed_lengths([4, 4, 4, 4], 16, at_least=3) == [[4, 4], [4], [4]]
    assert packed_lengths([5, 5], 10, at_least=9) == [[5], [5]]
    assert packed_lengths([], 10, at_least=2) == []


def test_a_row_longer_than_the_budget_is_named():
    with pytest.raises(
        ValueError, match=r"row 2 has 12 tokens, more than the 10 .*max_token_len_per_gpu"
    ):
        pack_into_micro_batches([3, 9, 12], 10)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60), st.integers(1, 9))
def test_shares_hold_every_row_once_and_none_has_more_than_the_mean_rounded_up(work, num_parts):
    parts = balance(work, num_parts)
    assert rows_of(parts) == list(range(len(work))) and len(parts) == num_parts
    assert max(map(len, parts)) == -(-len(work) // num_parts)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60), st.integers(1, 9))
def test_the_busiest_share_has_at_most_the_mean_and_one_rows_work(work, num_parts):
    loads = [sum(work[row] for row in part) for part in balance(work, num_parts)]
    assert max(loads) <= (sum(work) / num_parts + max(work)) * (1 + 1e-9)


def test_no_row_is_shared_as_nothing():
    assert [part.tolist() for part in balance([], 3)] == [[], [], []]


@pytest.mark.parametrize(("rows", "num_parts"), [(128, 8), (2048, 64), (1024, 16)])
@pytest.mark.parametrize("law", ["lognormal", "uniform", "bimodal"])
def test_shares_of_many_rows_are_even(law, rows, num_parts):
    draw = np.random.default_rng(0)
    work = {
        "lognormal": draw.lognormal(6.5, 1, rows).clip(max=8192),
        "uniform": draw.uniform(64, 8192, rows),
        "bimodal": np.where(
            draw.random(rows) < 0.8, draw.uniform(100, 600, rows), draw.uniform(5000, 8192, rows)
        ),
    }[law]
    shares = np.array([work[part].sum() for part in balance(work, num_parts)])
    assert shares.max() / shares.mean() < 1.0005


def test_exchanges_improve_on_both_starts():
    # 1 + 8 and 4 + 5 are even; the longest first gives 8 + 1 too, and differencing pairs (8, 5) and
    # (4, 1).
    assert [part.tolist() for part in balance([8, 5, 4, 1], 2)] == [[0, 3], [1, 2]]


@settings(deadline=None)
@given(st.data())
def test_a_mini_batch_has_the_same_rows_on_any_number_of_ranks_which_have_about_as_many(data):
    num_rows, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 24))
    work = data.draw(
        st.none() | st.lists(st.integers(0, 1000), min_size=num_rows, max_size=num_rows)
    )
    for num_ranks in (1, 2, 3, 5):
        shares = rank_shares(num_rows, size, num_ranks, work)
        assert len(shares) == num_ranks and rows_of(shares) == list(range(num_rows))
        for first in range(0, num_rows, size):
            of_ranks = [[row for row in share if first <= row < first + size] for share in shares]
            num_in_step = min(size, num_rows - first)
            assert sum(map(len, of_ranks)) == num_in_step
            assert max(map(len, of_ranks)) <= -(-num_in_step // num_ranks)
        for share in shares:  # one mini-batch after the other
            assert (np.diff(share // size) >= 0).all()


def test_ranks_get_about_the_same_work_in_every_mini_batch():
    # Two long rows and two short ones in each half: taken as they come, one rank would have both
    # long ones.
    work = [100, 90, 1, 2, 3, 70, 4, 80]
    assert [share.tolist() for share in rank_shares(8, 4, 2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    shares = rank_shares(8, 4, 2, work)
    assert all(share.dtype == np.int64 for share in shares)
    # Of the ranks, by mini-batch
    loads = np.asarray(work)[np.stack(shares)].reshape(2, 2, 2).sum(-1).T.tolist()
    assert sorted(loads[0]) == [92, 101] and sorted(loads[1]) == [74, 83]


def test_rows_that_do_not_divide_are_one_more_on_some_ranks():
    assert [share.tolist() for share in rank_shares(7, 5, 3)] == [[0, 1, 5], [2, 3, 6], [4]]
    assert [share.tolist() for share in rank_shares(1, 4, 3)] == [[0], [], []]
