"""The learning rate as a function of the training step."""

import pytest

from verl_like.workers.config.engine import OptimConfig
from verl_like.workers.engine.optimizer import learning_rate


def rates(steps, total_steps=None, **settings):
    return [learning_rate(step, OptimConfig(lr=2.0, **settings), total_steps) for step in steps]


def test_warm_up_rises_linearly_and_its_first_step_already_learns():
    assert rates(range(6), lr_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_warm_up_can_be_a_fraction_of_all_steps():
    assert rates(range(4), lr_warmup_steps_ratio=0.2, total_steps=10) == [1.0, 2.0, 2.0, 2.0]


def test_linear_decay_reaches_0_at_the_end_and_stays_there():
    assert rates([0, 5, 10, 12], lr_scheduler_type="linear", total_steps=10) == [2.0, 1.0, 0.0, 0.0]


def test_a_decay_of_one_step_after_the_warm_up_ends_at_0():
    assert rates(range(4), lr_scheduler_type="linear", lr_warmup_steps=2, total_steps=3) == [
        1.0,
        2.0,
        2.0,
        0.0,
    ]


def test_cosine_decay_is_half_a_cosine_from_the_peak_to_0():
    got = rates([1, 2, 5, 7, 9], lr_scheduler_type="cosine", lr_warmup_steps=1, total_steps=9)
    # 1 + cos(pi * x) at x = 0, 1/8, 1/2, 3/4, 1
    assert got == pytest.approx([2.0, 1.92387953, 1.0, 0.29289322, 0.0])


def test_a_decay_without_the_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="total_training_steps"):
        rates([0], lr_scheduler_type="cosine")
