"""Whose turn it is with the weights of a detached trainer: a step's or a maker's."""

import threading
import time
from collections.abc import Callable

import pytest

from verl_like.single_controller.failure import CallTimeout
from verl_like.trainer.detached.weight_turns import WeightTurns

SOON_S = 0.1


def started(call: Callable[[], object]) -> threading.Thread:
    """A thread that has had time to get to where it waits."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    time.sleep(SOON_S)
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(60)
    return not thread.is_alive()


def ended_soon(thread: threading.Thread) -> bool:
    thread.join(SOON_S)
    return not thread.is_alive()


def test_makers_load_between_steps_one_after_the_other_and_the_next_step_waits_for_those_that_asked() -> (
    None
):
    turns, events = WeightTurns("trainer_0", limit_s=60), []
    turns.begin_step()

    def begin_loading(maker: str) -> None:
        turns.begin_loading(maker)
        events.append(maker)

    def step() -> None:
        turns.begin_step()
        events.append("step")

    first = started(lambda: begin_loading("maker_0.1"))
    assert not events  # the step changes the weights
    turns.end_step()
    assert ended(first)
    second = started(lambda: begin_loading("maker_1.1"))
    next_step = started(step)
    assert events == ["maker_0.1"]
    with turns.loading("maker_0.1", ends=False):
        pass
    with turns.loading("maker_0.1"):
        time.sleep(SOON_S)
        assert events == ["maker_0.1"]
    assert ended(second)
    time.sleep(SOON_S)
    assert events == ["maker_0.1", "maker_1.1"]
    with turns.loading("maker_1.1"):
        pass
    assert ended(next_step)
    assert events == ["maker_0.1", "maker_1.1", "step"]


def test_a_maker_that_was_started_again_takes_the_turn_of_the_process_that_died_in_it() -> None:
    turns = WeightTurns("trainer_0", limit_s=60)
    turns.begin_loading("maker_0.1")
    other = started(lambda: turns.begin_loading("maker_1.1"))
    assert not ended_soon(other)
    assert ended(started(lambda: turns.begin_loading("maker_0.2")))
    with (
        pytest.raises(CallTimeout, match=r"the turn of maker_0\.1, which is over"),
        turns.loading("maker_0.1"),
    ):
        pass
    with turns.loading("maker_0.2"):
        pass
    assert ended(other)


def test_the_wait_of_a_process_that_died_takes_no_turn_from_the_one_in_its_place() -> None:
    turns, errors = WeightTurns("trainer_0", limit_s=60), []
    turns.begin_step()

    def begin_loading() -> None:
        try:
            turns.begin_loading("maker_0.1")
        except CallTimeout as error:
            errors.append(str(error))

    dead = started(begin_loading)
    again = started(lambda: turns.begin_loading("maker_0.2"))
    assert ended(dead) and "the turn of maker_0.1" in errors[0]
    turns.end_step()
    assert ended(again)
    with turns.loading("maker_0.2"):
        pass
    turns.begin_step()


def test_the_late_end_of_a_process_that_died_leaves_the_turn_to_the_one_in_its_place() -> None:
    turns = WeightTurns("trainer_0", limit_s=0.05)
    turns.begin_loading("maker_0.1")
    with turns.loading("maker_0.1"):
        turns.begin_loading("maker_0.2")
    with pytest.raises(CallTimeout, match=r"waiting for maker_0\.2 to load the weights"):
        turns.begin_step()


def test_a_transfer_that_fails_ends_all_that_comes_after_it_with_its_error() -> None:
    turns = WeightTurns("trainer_0", limit_s=60)
    turns.begin_loading("maker_0.1")
    errors: list[str] = []

    def begin_loading() -> None:
        try:
            turns.begin_loading("maker_1.1")
        except RuntimeError as error:
            errors.append(str(error))

    waiting = started(begin_loading)
    with (
        pytest.raises(RuntimeError, match="a peer is gone"),
        turns.loading("maker_0.1", ends=False),
    ):
        raise RuntimeError("a peer is gone")
    assert ended(waiting) and errors == ["a peer is gone"]
    for call in (turns.begin_step, turns.raise_failure, begin_loading):
        errors.clear()
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
        assert errors == ["a peer is gone"]


def test_who_does_not_end_a_turn_is_named() -> None:
    turns = WeightTurns("trainer_0", limit_s=0.05)
    turns.begin_loading("maker_3.1")
    with pytest.raises(
        CallTimeout, match=r"trainer_0\.fit .* waiting for maker_3\.1 to load the weights"
    ):
        turns.begin_step()
    with pytest.raises(
        CallTimeout, match=r"trainer_0\.hold_weights .* waiting for the turn of maker_1\.1"
    ):
        turns.begin_loading("maker_1.1")
    with turns.loading("maker_3.1"):
        pass
    turns.begin_step()
    with pytest.raises(CallTimeout, match=r"the turn of maker_1\.1"):
        turns.begin_loading("maker_1.1")
    turns.end_step()
    turns.begin_step()  # it is not waited for a maker that has given up
