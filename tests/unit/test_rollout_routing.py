"""Which replica takes which request: equal shares of a call, or whoever has the most free
places."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.workers.rollout.request import GenerationRequest, Sampling
from verl_like.workers.rollout.routing import RequestQueue

SAMPLING = Sampling(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=3, stop_token_ids=())


def requests_of(call, num_prompts, n):
    """Requests of a call named <call><prompt>.<sample>, those of a prompt next to each other."""
    names = [f"{call}{prompt}.{sample}" for prompt in range(num_prompts) for sample in range(n)]
    return [GenerationRequest(name, [7], seed=0, sampling=SAMPLING) for name in names]


def names(taken):
    return [[request.name for request in share] for share in taken]


def test_equal_shares_are_consecutive_prompts_with_all_their_samples_and_the_first_ones_have_one_more():
    queue = RequestQueue("fixed", num_replicas=3, num_slots=2)
    queue.add(requests_of("a", num_prompts=5, n=2), n=2)
    assert names(queue.take()) == [
        ["a0.0", "a0.1", "a1.0", "a1.1"],
        ["a2.0", "a2.1", "a3.0", "a3.1"],
        ["a4.0", "a4.1"],
    ]
    assert queue.loads == [4, 4, 2], "all at once, though a replica has two slots"
    assert queue.take() == [[], [], []] and len(queue) == 10


def test_an_equal_share_is_a_function_of_the_requests_of_its_call_alone():
    queue = RequestQueue("fixed", num_replicas=2, num_slots=4)
    queue.add(requests_of("a", num_prompts=3, n=1), n=1)
    assert names(queue.take()) == [["a0.0", "a1.0"], ["a2.0"]]
    queue.ended("a0.0")
    queue.add(requests_of("b", num_prompts=3, n=1), n=1)
    assert names(queue.take()) == [[], []], (
        "when it begins does not depend on when responses of the call before end"
    )
    assert len(queue) == 5 and sum(queue.loads) == 2
    queue.ended("a1.0")
    queue.ended("a2.0")
    assert names(queue.take()) == [["b0.0", "b1.0"], ["b2.0"]]
    assert queue.loads == [2, 1] and len(queue) == 3


def test_a_call_that_waits_for_the_one_before_can_be_removed_in_part():
    queue = RequestQueue("fixed", num_replicas=2, num_slots=4)
    queue.add(requests_of("a", num_prompts=1, n=1), n=1)
    queue.add(requests_of("b", num_prompts=2, n=2), n=2)
    queue.add(requests_of("c", num_prompts=1, n=1), n=1)
    assert queue.remove(["b0.0", "b0.1", "b1.1", "c0.0"]) == []
    queue.take()
    queue.ended("a0.0")
    assert names(queue.take()) == [[], ["b1.0"]] and len(queue) == 1


def test_samples_of_a_prompt_stay_together_where_there_is_room():
    queue = RequestQueue("least_loaded", num_replicas=3, num_slots=4)
    with_uids = [replace(each, uid=each.name[1]) for each in requests_of("a", num_prompts=3, n=3)]
    queue.add(with_uids, n=3)
    assert names(queue.take()) == [
        [f"a{prompt}.{sample}" for sample in range(3)] for prompt in range(3)
    ]
    queue.add([replace(each, uid="9") for each in requests_of("b", num_prompts=1, n=2)], n=2)
    assert names(queue.take()) == [["b0.0"], ["b0.1"], []], "the first has one place left"


def test_one_replica_takes_more_than_it_has_places_for():
    queue = RequestQueue("least_loaded", num_replicas=1, num_slots=2)
    queue.add(requests_of("a", num_prompts=5, n=1), n=1)
    assert names(queue.take()) == [[f"a{prompt}.0" for prompt in range(5)]]


def test_fewer_prompts_than_replicas_leave_the_last_ones_without_work():
    queue = RequestQueue("fixed", num_replicas=4, num_slots=4)
    queue.add(requests_of("a", num_prompts=2, n=3), n=3)
    assert names(queue.take()) == [["a0.0", "a0.1", "a0.2"], ["a1.0", "a1.1", "a1.2"], [], []]


def test_the_least_loaded_replica_takes_the_next_request_and_of_equal_ones_the_first():
    queue = RequestQueue("least_loaded", num_replicas=3, num_slots=2)
    queue.add(requests_of("a", num_prompts=4, n=2), n=2)
    assert names(queue.take()) == [["a0.0", "a1.1"], ["a0.1", "a2.0"], ["a1.0", "a2.1"]]
    assert queue.loads == [2, 2, 2] and names([queue.waiting]) == [["a3.0", "a3.1"]]
    assert queue.take() == [[], [], []], "no place is free"
    queue.ended("a1.0")
    queue.ended("a2.1")
    queue.ended("a0.1")
    queue.add(requests_of("b", num_prompts=2, n=1), n=1)
    # Free places: 0, 1, 2. The last has most of them, then the second and the third have as many.
    assert names(queue.take()) == [[], ["a3.1"], ["a3.0", "b0.0"]]
    assert names([queue.waiting]) == [["b1.0"]] and len(queue) == 7


def test_requests_that_are_removed_free_their_places_and_those_that_a_replica_may_have_are_told():
    queue = RequestQueue("least_loaded", num_replicas=2, num_slots=2)
    queue.add(requests_of("a", num_prompts=3, n=2), n=2)
    queue.take()  # a0.0 and a1.0 to the first, a0.1 and a1.1 to the second
    assert queue.remove(["a0.1", "a2.0", "unknown"]) == ["a0.1"]
    assert queue.loads == [2, 1] and len(queue) == 4
    assert names(queue.take()) == [[], ["a2.1"]]
    assert queue.replica_of == {"a0.0": 0, "a1.0": 0, "a1.1": 1, "a2.1": 1}
    queue.ended("a1.1")
    assert queue.loads == [2, 1] and "a1.1" not in queue.replica_of


def test_a_request_that_is_removed_before_it_was_taken_is_not_sent():
    queue = RequestQueue("fixed", num_replicas=2, num_slots=2)
    queue.add(requests_of("a", num_prompts=2, n=2), n=2)
    assert queue.remove(["a0.1", "a1.0"]) == ["a0.1", "a1.0"]
    assert names(queue.take()) == [["a0.0"], ["a1.1"]] and queue.loads == [1, 1]


def test_a_request_can_be_added_again_after_it_was_removed():
    queue = RequestQueue("least_loaded", num_replicas=2, num_slots=1)
    queue.add(requests_of("a", num_prompts=3, n=1), n=1)
    queue.take()
    assert queue.remove(["a1.0", "a2.0"]) == ["a1.0"]
    queue.add(requests_of("a", num_prompts=3, n=1)[1:], n=1)
    assert names(queue.take()) == [[], ["a1.0"]] and len(queue) == 3


@pytest.mark.parametrize("routing", ["fixed", "least_loaded"])
def test_a_call_without_requests_adds_nothing(routing):
    queue = RequestQueue(routing, num_replicas=2, num_slots=1)
    queue.add([], n=2)
    assert queue.take() == [[], []] and len(queue) == 0


CALLS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4)


@settings(deadline=None)
@given(CALLS, st.integers(2, 5), st.integers(1, 4), st.integers(0, 1000))
def test_every_request_is_taken_once_in_the_order_of_arrival_and_no_replica_has_more_than_its_slots(
    calls, num_replicas, num_slots, seed
):
    chance, queue = random.Random(seed), RequestQueue("least_loaded", num_replicas, num_slots)
    coming = [(requests_of(f"c{i}-", *call), call[1]) for i, call in enumerate(calls)]
    order, num_added = [request.name for requests, _ in coming for request in requests], 0
    taken, running = [], [[] for _ in range(num_replicas)]
    while coming or len(queue):
        if coming and (chance.random() < 0.5 or not len(queue)):
            requests, n = coming.pop(0)
            queue.add(requests, n=n)
            num_added += len(requests)
        num_free = sum(num_slots - len(each) for each in running)
        now = names(queue.take())
        assert sum(map(len, now)) == min(num_free, num_added - len(taken))
        assert all(share == sorted(share, key=order.index) for share in now)
        taken += sorted((name for share in now for name in share), key=order.index)
        assert taken == order[: len(taken)]
        running = [[*before, *share] for before, share in zip(running, now, strict=True)]
        assert queue.loads == [len(each) for each in running] and max(queue.loads) <= num_slots
        assert all(
            load <= min(queue.loads) + 1
            for load, share in zip(queue.loads, now, strict=True)
            if share
        )
        in_flight = [name for each in running for name in each]
        for name in chance.sample(
            in_flight, chance.randint(min(1, len(in_flight)), len(in_flight))
        ):
            queue.ended(name)
            running = [[each for each in share if each != name] for share in running]
    assert taken == order and queue.loads == [0] * num_replicas


@settings(deadline=None)
@given(CALLS, st.integers(1, 5))
def test_equal_shares_take_every_request_once_and_differ_by_a_prompt_at_most(calls, num_replicas):
    queue = RequestQueue("fixed", num_replicas, num_slots=1)
    for i, (num_prompts, n) in enumerate(calls):
        requests = requests_of(f"c{i}-", num_prompts, n)
        queue.add(requests, n=n)
        taken = names(queue.take())
        assert [name for share in taken for name in share] == [request.name for request in requests]
        num_of_share = [len(share) // n for share in taken]
        assert (
            num_of_share == sorted(num_of_share, reverse=True)
            and max(num_of_share) - min(num_of_share) <= 1
        )
        assert all(
            set(Counter(name.split(".")[0] for name in share).values()) <= {n} for share in taken
        )
        queue.remove([request.name for request in requests])
