"""KL estimators, the penalty in the reward and the coefficient's controllers."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from verl_like.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)

NAN = float("nan")


@dataclass
class KLControlBlock:
    type: str
    kl_coef: float = 0.1
    target_kl: float = 0.5


NUMPY_ESTIMATORS = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": np.abs,
    "mse": lambda d: d**2 / 2,
    "k2": lambda d: d**2 / 2,
    "low_var_kl": lambda d: np.exp(-d) - 1 + d,
    "k3": lambda d: np.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_each_estimator_matches_numpy_and_its_gradient_is_right(name):
    generator = torch.Generator().manual_seed(0)
    logprob, ref = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = NUMPY_ESTIMATORS[name]((logprob - ref).numpy())
    np.testing.assert_allclose(kl_penalty(logprob, ref, name).numpy(), expected, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, name), logprob.requires_grad_())


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_plus_suffix_keeps_the_value_and_takes_the_gradient_of_k2(name):
    logprob = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.5, -0.5], dtype=torch.float64)
    value = kl_penalty(logprob, ref, name + "+")
    value.sum().backward()
    torch.testing.assert_close(value, kl_penalty(logprob, ref, name))
    torch.testing.assert_close(logprob.grad, (logprob - ref).detach())  # d/dx (x - ref)^2 / 2


def test_k3_stays_finite_for_far_apart_policies():
    # d = -60: exp(20) is bounded by the clamp to 10; d = +60: exp(-20) + 20 - 1 is bounded by 10
    # too.
    estimates = kl_penalty(
        torch.tensor([-60.0, 0.0, 0.0]), torch.tensor([0.0, -60.0, 0.0]), "low_var_kl"
    )
    assert estimates.tolist() == [10.0, 10.0, 0.0]


def test_unknown_estimators_list_the_known_ones_and_full_says_why_not():
    with pytest.raises(ValueError, match=r"'k4': choose one of .*low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match=r"'full' \(it needs the logits"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


def test_the_penalty_lowers_each_response_token_reward_by_coef_times_kl():
    # k1: row 0 KL = [0.5, -0.1], row 1 KL = [1.0]; row means 0.2 and 1.0; the empty row does not
    # count
    scores = torch.tensor([[0.0, 1.0], [2.0, NAN], [5.0, 5.0]])
    log_probs = torch.tensor([[-1.0, -1.1], [-1.0, NAN], [NAN, NAN]])
    ref = torch.tensor([[-1.5, -1.0], [-2.0, NAN], [NAN, NAN]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    rewards, current_kl = apply_kl_penalty(
        scores, log_probs, ref, mask, kl_coef=0.1, estimator="kl"
    )
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 1.01], [1.9, 0.0], [0.0, 0.0]]))
    assert current_kl == pytest.approx((0.2 + 1.0) / 2, rel=1e-5)


def test_the_adaptive_controller_moves_towards_the_target_by_at_most_a_fifth():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.5, horizon=1000)
    # Error 9, clipped to 0.2: * (1 + 0.2 * 100 / 1000)
    controller.update(current_kl=5.0, n_steps=100)
    assert controller.value == pytest.approx(0.1 * 1.02)
    controller.update(current_kl=0.45, n_steps=100)  # error -0.1: * (1 - 0.01)
    assert controller.value == pytest.approx(0.1 * 1.02 * 0.99)
    controller.update(current_kl=0.0, n_steps=100)  # error -1, clipped to -0.2
    assert controller.value == pytest.approx(0.1 * 1.02 * 0.99 * 0.98)


def test_the_configured_adaptive_controller_has_a_horizon_of_10000_samples():
    controller = get_kl_controller(KLControlBlock("adaptive", kl_coef=0.3, target_kl=0.25))
    controller.update(current_kl=0.2, n_steps=64)  # error -0.2
    assert controller.value == pytest.approx(0.3 * (1 - 0.2 * 64 / 10_000), rel=1e-12)


def test_the_fixed_controller_never_moves():
    controller = get_kl_controller(KLControlBlock("fixed", kl_coef=0.3))
    assert isinstance(controller, FixedKLController)
    controller.update(current_kl=100.0, n_steps=1000)
    assert controller.value == 0.3


@pytest.mark.parametrize("current_kl", [NAN, math.inf])
def test_the_adaptive_controller_refuses_a_non_finite_measurement(current_kl):
    controller = AdaptiveKLController(0.1, 0.5, 1000)
    with pytest.raises(ValueError, match="expected a finite number"):
        controller.update(current_kl, 10)
    assert controller.value == 0.1


def test_impossible_controller_settings_are_refused():
    with pytest.raises(ValueError, match="target_kl=0"):
        get_kl_controller(KLControlBlock("adaptive", target_kl=0))
    with pytest.raises(ValueError, match=r"target_kl=0\.0"):
        get_kl_controller(KLControlBlock("adaptive", target_kl=0.0))
    with pytest.raises(ValueError, match=r"'adaptiv'.*'fixed' or 'adaptive'"):
        get_kl_controller(KLControlBlock("adaptiv"))
