"""The order of the rows."""

import pytest

from verl_like.data import EpochSampler


def test_an_epoch_uses_every_row_at_most_once_and_drops_the_incomplete_batch() -> None:
    sampler = EpochSampler(num_rows=10, batch_size=3, seed=1)
    assert sampler.num_batches_per_epoch == 3
    batches = [sampler.batch(step) for step in range(6)]
    assert [epoch for epoch, _ in batches] == [0, 0, 0, 1, 1, 1]
    for start in (0, 3):
        rows = [row for _, indices in batches[start : start + 3] for row in indices]
        assert len(rows) == len(set(rows)) == 9 and set(rows) <= set(range(10))


def test_a_batch_is_a_function_of_seed_and_step_alone() -> None:
    first, second = EpochSampler(100, 8, seed=7), EpochSampler(100, 8, seed=7)
    uninterrupted = [first.batch(step) for step in range(30)]
    assert [second.batch(step) for step in reversed(range(30))] == uninterrupted[::-1]
    # Step 12 is the first of epoch 1, in another order
    assert uninterrupted[0][1] != uninterrupted[12][1]
    assert EpochSampler(100, 8, seed=8).batch(0) != uninterrupted[0]


def test_the_order_never_changes_between_versions() -> None:
    assert EpochSampler(6, 6, seed=42).batch(1) == (1, [5, 0, 2, 1, 3, 4])


def test_without_shuffling_every_epoch_is_in_order() -> None:
    sampler = EpochSampler(num_rows=5, batch_size=2, shuffle=False)
    assert [sampler.batch(step) for step in range(3)] == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1])]


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 7 rows, fewer than data\.train_batch_size=8"):
        EpochSampler(num_rows=7, batch_size=8)
