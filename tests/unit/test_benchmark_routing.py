"""The simulation of benchmarks/routing.py, on a few requests."""

import numpy as np
import pytest

from benchmarks.routing import MAX_OVER_MEAN, exponential_lengths, limit, simulate

ROUTINGS = ("fixed", "least_loaded")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_replica_begins_the_next_request_as_one_ends(routing):
    assert simulate(routing, [[1, 2, 3]], n=1, num_replicas=1, num_slots=1) == ([6.0], 6.0)
    # One slot has the first, the other one the next three.
    assert simulate(routing, [[4, 1, 2, 2]], n=1, num_replicas=1, num_slots=2) == ([5.0], 9.0)


def test_of_equal_parts_one_may_take_longer_and_from_one_queue_the_free_replica_takes_the_next():
    batch = [3, 1, 1, 1]
    assert simulate("fixed", [batch], n=1, num_replicas=2, num_slots=1) == ([4.0], 6.0)
    assert simulate("least_loaded", [batch], n=1, num_replicas=2, num_slots=1) == ([3.0], 6.0)


def test_an_equal_part_has_all_responses_to_its_prompts():
    batch = [2, 2, 3, 5, 1, 1]
    # [2, 2, 3, 5] and [1, 1]
    assert simulate("fixed", [batch], n=2, num_replicas=2, num_slots=2) == ([7.0], 14.0)
    # [2, 2, 3] and [5, 1, 1]
    assert simulate("fixed", [batch], n=3, num_replicas=2, num_slots=3) == ([5.0], 14.0)
    # [1, 1, 5, 3], [2, 2]
    assert simulate("fixed", [batch[::-1]], n=2, num_replicas=2, num_slots=2) == ([6.0], 14.0)


def test_equal_parts_of_a_batch_wait_for_the_one_before_and_in_one_queue_they_do_not():
    batches = [[3, 1], [1, 2], [4, 1]]
    assert simulate("fixed", batches, n=1, num_replicas=2, num_slots=1) == ([3.0, 5.0, 9.0], 12.0)
    # The second replica takes 1, 1 and 2, until 4, the first one 3 and 4, until 7; the last one is
    # the second's.
    assert simulate("least_loaded", batches, n=1, num_replicas=2, num_slots=1) == (
        [3.0, 4.0, 7.0],
        12.0,
    )


def test_a_queue_that_hears_late_of_an_end_leaves_a_slot_empty_meanwhile_but_no_part_waits_within_a_batch():
    settings = {"n": 1, "num_replicas": 2, "num_slots": 1, "told_late": 0.5}
    assert simulate("least_loaded", [[2, 1, 1]], **settings) == ([2.5], 4.0)
    assert simulate("fixed", [[2, 1, 1], [1, 1]], **settings) == ([3.0, 4.5], 6.0)


def test_the_limit_is_the_longest_request_or_all_of_them_over_all_slots():
    few, many = np.array([8.0, *[1.0] * 9]), np.ones(5 * 512)
    assert limit([few]) == pytest.approx(8 / 1.7)
    assert limit([many]) == limit([many[:1000], many[1000:]]) == 5


def test_lengths_follow_an_exponential_law_whose_greatest_is_eight_times_the_mean():
    num_set = []
    for seed in range(20):
        lengths, drawn = (
            exponential_lengths(1024, (seed, 1)),
            np.random.default_rng((seed, 1)).exponential(size=1024),
        )
        assert (
            lengths.max() / lengths.mean() == pytest.approx(MAX_OVER_MEAN, rel=1e-12)
            and MAX_OVER_MEAN == 8
        )
        is_kept = lengths < lengths.max()
        assert (
            np.array_equal(lengths[is_kept], drawn[is_kept])
            and drawn[is_kept].max() < drawn[~is_kept].min()
        )
        num_set.append(1024 - is_kept.sum())
    assert min(num_set) == 1 < max(num_set) <= 4
    assert not np.array_equal(lengths, exponential_lengths(1024, (19, 2)))
