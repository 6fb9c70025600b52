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


def test_makers_load_between_steps_one_after_the_other_and_the_next_step_waits_for_those_that_asked() -> None:
    turns, events = WeightTurns("trainer_0", limit_s=60), []
    turns.begin_step()

    def begin_loading(maker: str) -> None:
        turns.begin_loading(maker)
        events.append(maker)

    def step() -> None:
        turns.begin_step()
        events.append("step")

    first = started(lambda: begin_loading("maker_0"))
    assert not events  # the step changes the weights
    turns.end_step()
    assert ended(first)
    second = started(lambda: begin_loading("maker_1"))
    next_step = started(step)
    assert events == ["maker_0"]
    with turns.loading():
        time.sleep(SOON_S)
        assert events == ["maker_0"]
    assert ended(second)
    time.sleep(SOON_S)
    assert events == ["maker_0", "maker_1"]
    with turns.loading():
        pass
    assert ended(next_step)
    assert events == ["maker_0", "maker_1", "step"]


def test_a_maker_that_was_started_again_takes_the_turn_of_the_process_that_died_in_it() -> None:
    turns = WeightTurns("trainer_0", limit_s=60)
    turns.begin_loading("maker_0")
    again = started(lambda: turns.begin_loading("maker_0"))
    assert ended(again)
    with turns.loading():
        pass
    turns.begin_step()


def test_a_transfer_that_fails_ends_the_next_step_too_with_its_error() -> None:
    turns = WeightTurns("trainer_0", limit_s=60)
    turns.begin_loading("maker_0")
    with pytest.raises(CallTimeout, match="actor"), turns.loading():
        raise CallTimeout("actor", "send_weights", 7.0, "rank(s) [0] of 2")
    with pytest.raises(CallTimeout, match=r"actor\.send_weights"):
        turns.begin_step()


def test_who_does_not_end_a_turn_is_named() -> None:
    turns = WeightTurns("trainer_0", limit_s=0.05)
    turns.begin_loading("maker_3")
    with pytest.raises(CallTimeout, match=r"trainer_0\.fit .* waiting for maker_3 to load the weights"):
        turns.begin_step()
    with pytest.raises(CallTimeout, match=r"trainer_0\.hold_weights .* waiting for the turn of maker_1"):
        turns.begin_loading("maker_1")
    with turns.loading():
        pass
    turns.begin_step()
    with pytest.raises(CallTimeout, match="the turn of maker_1"):
        turns.begin_loading("maker_1")
    turns.end_step()
    turns.begin_step()  # it is not waited for a maker that has given up
