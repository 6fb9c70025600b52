"""Estimators that give each token its own advantage: by hand, and against a float64 NumPy
reference."""

from types import SimpleNamespace

import estimator_oracles as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.algorithms.advantages.optimal_token_baseline import (
    compute_optimal_token_baseline_advantage,
)
from verl_like.algorithms.advantages.reinforce_plus_plus import (
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl_like.algorithms.advantages.remax import compute_remax_outcome_advantage
from verl_like.algorithms.advantages.tir_optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
)

law = settings(max_examples=20, deadline=None, derandomize=True)
NAN = float("nan")
TOKEN_BASELINES = [
    compute_optimal_token_baseline_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
]


def tensors(columns):
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def gamma_of(gamma):
    return SimpleNamespace(gamma=gamma)


def test_remax_subtracts_the_greedy_reward_from_what_follows_each_token():
    advantages, returns = compute_remax_outcome_advantage(
        torch.tensor([[1.0, NAN, 2.0, 9.0], [0.0, 0.0, 4.0, 0.0]]),
        torch.tensor([0.5, 6.0]),
        torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]]),
    )
    assert torch.equal(returns, torch.tensor([[3.0, 0, 2, 0], [4, 4, 4, 0]]))
    assert torch.equal(advantages, torch.tensor([[2.5, 0, 1.5, 0], [-2, -2, -2, 0]]))


@law
@given(seed=st.integers(0, 2**31))
def test_remax_matches_the_numpy_reference_and_is_zero_without_a_greedy_reward(seed):
    batch = oracle.random_batch(seed)
    baselines = np.random.default_rng(seed).standard_normal(len(batch.mask)).astype(np.float32)
    baselines[[0, 7]] = np.nan
    advantages, returns = compute_remax_outcome_advantage(
        torch.from_numpy(batch.rewards), torch.from_numpy(baselines), torch.from_numpy(batch.mask)
    )
    expected = oracle.discounted_returns(batch, 1.0)
    np.testing.assert_allclose(returns.numpy(), expected, rtol=1e-6, atol=1e-6)
    compared = batch.mask & ~np.isnan(baselines[:, None])
    np.testing.assert_allclose(
        advantages.numpy(),
        np.where(compared, expected - baselines[:, None], 0),
        rtol=1e-6,
        atol=1e-6,
    )


def test_reinforce_plus_plus_discounts_from_token_to_token_and_whitens_the_batch():
    # gamma 0.5: returns 1 + 0.5 * 2 = 2 and 2 in row 0 (the hole takes no discount), -4 in row 1
    # mean 0, unbiased variance (4 + 4 + 16) / 2 = 12
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        torch.tensor([[1.0, NAN, 2.0], [-4.0, 9.0, 9.0]]),
        torch.tensor([[1, 0, 1], [1, 0, 0]]),
        gamma_of(0.5),
    )
    assert torch.equal(returns, torch.tensor([[2.0, 0, 2], [-4, 0, 0]]))
    torch.testing.assert_close(advantages, returns / 12**0.5)


@law
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_reinforce_plus_plus_matches_the_numpy_reference(seed, gamma):
    batch = oracle.random_batch(seed)
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        torch.from_numpy(batch.rewards), torch.from_numpy(batch.mask), gamma_of(gamma)
    )
    expected = oracle.discounted_returns(batch, gamma)
    selected = expected[batch.mask]
    whitened = (expected - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(returns.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        advantages.numpy(), np.where(batch.mask, whitened, 0), rtol=1e-5, atol=1e-5
    )


def test_reinforce_plus_plus_of_one_token_and_of_skipped_rows_is_zero():
    mask = torch.tensor([[1, 0], [0, 0]])
    advantages, _ = compute_reinforce_plus_plus_outcome_advantage(
        torch.full((2, 2), 3.0), mask, gamma_of(1.0)
    )
    assert torch.equal(advantages, torch.zeros(2, 2))
    advantages, _ = compute_reinforce_plus_plus_outcome_advantage(
        torch.full((2, 2), 3.0), mask * 0, gamma_of(1.0)
    )
    assert torch.equal(advantages, torch.zeros(2, 2))


@pytest.mark.parametrize("function", TOKEN_BASELINES)
def test_the_token_baseline_of_two_rows_equals_the_hand_derived_numbers(function):
    # w_t = 1 - 2 pi + sum of squares, pi = 1/2: in row 0 the squares are 1/2, so w = 1/2, 1/2; in
    # row 1 they are 1, so w = 1, 1 and, with the importance weight 2 at its second token, 1, 4. W:
    # 1/2, 1 and 1, 5 (1, 2 without weights). G: 3, 2 and 6, 6. B_1 = (1/2 * 3 + 1 * 6) / (3/2) = 5,
    # B_2 = (1 * 2 + 5 * 6) / 6 = 16/3 (14/3 without). The third token is row 1's alone: no
    # baseline, G = 6.
    rewards = torch.tensor([[1.0, 2.0, 9.0], [0.0, 0.0, 6.0]])
    mask, index = torch.tensor([[1, 1, 0], [1, 1, 1]]), np.array([*"aa"], dtype=object)
    log_half, squares = torch.full((2, 3), 0.5).log(), torch.tensor([[0.5], [1.0]]).expand(2, 3)
    weights = torch.tensor([[1.0, 1, 1], [1, 2, 1]])
    advantages, returns = function(
        rewards, mask, index, log_half, squares, rollout_is_weights=weights
    )
    torch.testing.assert_close(returns, torch.tensor([[3.0, 2, 0], [6, 6, 6]]))
    torch.testing.assert_close(advantages, torch.tensor([[-2.0, -10 / 3, 0], [1, 2 / 3, 6]]))
    advantages, _ = function(rewards, mask, index, log_half, squares, handle_zero_tail=False)
    torch.testing.assert_close(
        advantages, torch.tensor([[-2.0, 2 - 14 / 3, 0], [1, 6 - 14 / 3, 0]])
    )


def test_only_the_tool_integrated_form_compares_tokens_behind_different_holes():
    # Row 1 has a hole before its second token. By padded position only the first tokens meet; by
    # count all do. pi = 1 for every token, so all weights are equal: baselines are plain means.
    rewards, mask = (
        torch.tensor([[0.0, 2.0, 9.0], [0.0, 9.0, 4.0]]),
        torch.tensor([[1, 1, 0], [1, 0, 1]]),
    )
    index, zeros, ones = np.array([*"aa"], dtype=object), torch.zeros(2, 3), torch.ones(2, 3)
    by_position, _ = compute_optimal_token_baseline_advantage(rewards, mask, index, zeros, ones)
    torch.testing.assert_close(by_position, torch.tensor([[-1.0, 2, 0], [1, 0, 4]]))
    by_count, _ = compute_multi_turn_optimal_token_baseline_advantage(
        rewards, mask, index, zeros, ones
    )
    torch.testing.assert_close(by_count, torch.tensor([[-1.0, -1, 0], [1, 0, 1]]))


@pytest.mark.parametrize("function", TOKEN_BASELINES)
@law
@given(seed=st.integers(0, 2**31), weighted=st.booleans(), zero_tail=st.booleans())
def test_the_token_baseline_matches_the_numpy_reference(function, seed, weighted, zero_tail):
    batch = oracle.random_batch(seed)
    columns = batch.columns(seed)
    if not weighted:
        del columns["rollout_is_weights"]
    is_by_count = function is compute_multi_turn_optimal_token_baseline_advantage
    positions = (
        batch.mask.cumsum(-1)
        if is_by_count
        else np.broadcast_to(np.arange(batch.mask.shape[1]), batch.mask.shape)
    )
    advantages, returns = function(
        torch.from_numpy(batch.rewards),
        torch.from_numpy(batch.mask),
        batch.index,
        handle_zero_tail=zero_tail,
        **tensors(columns),
    )
    assert advantages.dtype == returns.dtype == torch.float32
    np.testing.assert_allclose(
        returns.numpy(), oracle.discounted_returns(batch, 1.0), rtol=1e-5, atol=1e-5
    )
    expected = oracle.optimal_token_baseline(batch, columns, positions, zero_tail)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", TOKEN_BASELINES)
@pytest.mark.parametrize("probability", [1.0, 0.3])
def test_the_token_baseline_of_equal_scores_is_exactly_zero_also_where_the_policy_is_certain(
    function, probability
):
    rewards = torch.zeros(7, 3)
    rewards[:, 2] = 0.1
    log_probs, squares = torch.full((7, 3), probability).log(), torch.full((7, 3), probability**2)
    advantages, _ = function(
        rewards, torch.ones(7, 3), np.array(["a"] * 7, dtype=object), log_probs, squares
    )
    assert torch.equal(advantages, torch.zeros(7, 3))


@pytest.mark.parametrize("function", TOKEN_BASELINES)
def test_the_token_baseline_has_no_gradient_and_leaves_its_inputs_unchanged(function):
    batch = oracle.random_batch(5)
    columns = tensors({"rewards": batch.rewards, "mask": batch.mask, **batch.columns(5)})
    before = {name: column.clone() for name, column in columns.items()}
    columns["old_log_probs"].requires_grad_()
    rewards, mask = columns.pop("rewards"), columns.pop("mask")
    advantages, returns = function(rewards, mask, batch.index, **columns)
    assert not advantages.requires_grad and not returns.requires_grad
    for name, column in {"rewards": rewards, "mask": mask, **columns}.items():
        torch.testing.assert_close(column.detach(), before[name], rtol=0, atol=0, equal_nan=True)
