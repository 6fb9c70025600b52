"""Advantage estimators against hand-derived numbers and an independent float64 NumPy reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate_advantages,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl_like.algorithms.advantages.gae import compute_gae_advantage_return
from verl_like.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from verl_like.algorithms.discounted_sums import discounted_sums, gae_in_blocks

NAN, INF = float("nan"), float("inf")


def gae_reference(rewards, values, mask, gamma, lam):
    """Drops the masked-out tokens, sums A_t = sum_k (gamma lam)^k delta_{t+k} explicitly, puts the
    tokens back."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for row in range(len(rewards)):
        kept = np.flatnonzero(mask[row])
        r, v = rewards[row, kept].astype(np.float64), values[row, kept].astype(np.float64)
        v_next = np.append(v[1:], 0.0)[: len(v)]
        delta = r + gamma * v_next - v
        for t in range(len(kept)):
            powers = (gamma * lam) ** np.arange(len(kept) - t)
            advantages[row, kept[t]] = np.dot(powers, delta[t:])
        returns[row, kept] = advantages[row, kept] + v
    selected = advantages[mask.astype(bool)]
    whitened = (advantages - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8)
    return np.where(mask.astype(bool), whitened, 0.0), returns


def grpo_reference(rewards, mask, index, epsilon, norm):
    out = np.zeros(rewards.shape)
    for key in set(index):
        rows = [i for i in range(len(index)) if index[i] == key]
        scored = [i for i in rows if mask[i].any()]
        scores = {
            i: float(rewards[i][mask[i].astype(bool)].astype(np.float64).sum()) for i in scored
        }
        values = np.array(list(scores.values()))
        for i in scored:
            if len(rows) == 1:
                mean, std = 0.0, 1.0
            elif len(scored) == 1:
                mean, std = scores[i], 0.0
            else:
                mean, std = values.mean(), values.std(ddof=1)
            out[i] = mask[i] * ((scores[i] - mean) / (std + epsilon) if norm else scores[i] - mean)
    return out


def test_gae_of_two_tokens_equals_the_hand_derived_numbers():
    # gamma 0.5, lam 0.5, r = [0, 1], V = [0.5, 0.25]:
    # delta_1 = 1 - 0.25 = 0.75, delta_0 = 0 + 0.5 * 0.25 - 0.5 = -0.375
    # A_1 = 0.75, A_0 = -0.375 + 0.25 * 0.75 = -0.1875; returns = A + V = [0.3125, 1.0]
    # whitening: mean 0.28125, deviations -+0.46875, unbiased var 2 * 0.46875^2 = 0.439453125
    advantages, returns = compute_gae_advantage_return(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), torch.tensor([[1, 1]]), 0.5, 0.5
    )
    torch.testing.assert_close(returns, torch.tensor([[0.3125, 1.0]]))
    torch.testing.assert_close(
        advantages, torch.tensor([[-1.0, 1.0]]) * (0.46875 / (0.439453125 + 1e-8) ** 0.5)
    )


def test_gae_carries_value_and_advantage_across_a_hole_in_the_mask():
    # The hole (token 1) takes no discount and its reward 9 and value 9 are not read: same as the
    # two-token case above.
    _, returns = compute_gae_advantage_return(
        torch.tensor([[0.0, 9.0, 1.0]]),
        torch.tensor([[0.5, 9.0, 0.25]]),
        torch.tensor([[1, 0, 1]]),
        0.5,
        0.5,
    )
    torch.testing.assert_close(returns, torch.tensor([[0.3125, 0.0, 1.0]]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_gae_matches_the_numpy_reference_with_padding_holes_and_empty_rows(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 17, generator=generator)
    values = torch.randn(6, 17, generator=generator)
    mask = (torch.rand(6, 17, generator=generator) < 0.7).long()
    mask[0] = 0  # skipped row
    mask[1] = 1
    mask[2, 5:] = 0  # short response
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    expected_advantages, expected_returns = gae_reference(
        rewards.numpy(), values.numpy(), mask.numpy(), gamma, lam
    )
    np.testing.assert_allclose(returns.numpy(), expected_returns, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantages.numpy(), expected_advantages, rtol=1e-5, atol=1e-5)


def recurrence(rewards, values, mask, gamma, lam):
    """One row's returns, token by token from the end; a masked token passes on what came after it,
    as in verl."""
    next_value = next_advantage = 0.0
    returns = np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        if mask[t]:
            next_advantage = (
                rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
            )
            next_value = values[t]
            returns[t] = next_advantage + values[t]
    return returns


@settings(deadline=None)
@given(
    length=st.sampled_from([1, 2, 63, 64, 65, 127, 128, 200]),
    kept=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_gae_equals_the_recurrence_for_any_holes_and_lengths_around_its_block(
    length, kept, gamma, lam, dtype, seed
):
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal((2, 3, length))
    mask = rng.random((3, length)) < kept
    expected = np.stack(
        [recurrence(*row, gamma, lam) for row in zip(rewards, values, mask, strict=True)]
    )
    dirty = [
        torch.from_numpy(np.where(mask, column, np.nan)).to(dtype) for column in (rewards, values)
    ]
    _, returns = compute_gae_advantage_return(*dirty, torch.from_numpy(mask), gamma, lam)
    assert returns.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(returns.numpy(), expected, rtol=tolerance, atol=tolerance * 30)


def test_gae_of_many_long_rows_is_that_of_each_row_alone():
    generator = torch.Generator().manual_seed(0)
    # More than are computed at a time
    rewards, values = torch.randn(2, 5, 300_000, generator=generator)
    mask = torch.rand(5, 300_000, generator=generator) < 0.9
    _, returns = compute_gae_advantage_return(rewards, values, mask, 0.999, 1.0)
    for row in range(5):
        alone = compute_gae_advantage_return(
            rewards[[row]], values[[row]], mask[[row]], 0.999, 1.0
        )[1]
        torch.testing.assert_close(returns[[row]], alone, rtol=0, atol=0)


def test_discounted_sums_of_ones_are_the_geometric_series_also_without_and_with_full_discount():
    ones = torch.ones(1, 128, dtype=torch.float64)
    steps_left = torch.arange(128, 0, -1, dtype=torch.float64)
    torch.testing.assert_close(discounted_sums(ones, 0.5)[0], 2 - 0.5 ** (steps_left - 1))
    assert torch.equal(discounted_sums(ones, 1.0)[0], steps_left)
    assert torch.equal(discounted_sums(ones, 0.0), ones)


def test_gae_ignores_nan_and_infinity_at_masked_positions():
    rewards, values = torch.tensor([[0.0, NAN, 1.0, INF]]), torch.tensor([[0.5, INF, 0.25, NAN]])
    mask = torch.tensor([[1, 0, 1, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.3125, 0.0, 1.0, 0.0]]))
    assert torch.isfinite(advantages).all()
    assert advantages[0, 1] == 0 and advantages[0, 3] == 0


def test_gae_propagates_nan_at_a_response_token():
    _, returns = compute_gae_advantage_return(
        torch.tensor([[NAN, 1.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.long), 1.0, 1.0
    )
    assert returns[0, 0].isnan()


def test_gae_of_a_batch_in_which_every_sample_was_skipped_is_zero():
    nothing = torch.zeros(2, 3, dtype=torch.long)
    advantages, returns = compute_gae_advantage_return(
        torch.ones(2, 3), torch.ones(2, 3), nothing, 1.0, 1.0
    )
    assert torch.equal(advantages, torch.zeros(2, 3))
    assert torch.equal(returns, torch.zeros(2, 3))


def test_estimators_leave_their_inputs_unchanged():
    rewards, values = torch.randn(4, 5), torch.randn(4, 5)
    mask, index = torch.ones(4, 5, dtype=torch.long), np.array(["a", "a", "b", "b"], dtype=object)
    before = [tensor.clone() for tensor in (rewards, values, mask)]
    compute_gae_advantage_return(rewards, values, mask, 0.9, 0.9)
    compute_grpo_outcome_advantage(rewards, mask, index)
    for tensor, copy in zip((rewards, values, mask), before, strict=True):
        assert torch.equal(tensor, copy)


def test_grpo_of_two_groups_equals_the_hand_derived_numbers():
    # group a: scores 1, 3: mean 2, unbiased std sqrt(2); group b: scores 0, 0, 6: mean 2, std
    # sqrt((4 + 4 + 16) / 2)
    rewards = torch.tensor([[0.0, 1.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [6.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 0]])
    index = np.array(["a", "a", "b", "b", "b"], dtype=object)
    a, b, c = 1 / (2**0.5 + 1e-6), 2 / (12**0.5 + 1e-6), 4 / (12**0.5 + 1e-6)
    expected = torch.tensor([[-a, -a], [a, a], [-b, 0.0], [-b, -b], [c, 0.0]])
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, index)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected)
    without_std, _ = compute_grpo_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    )
    torch.testing.assert_close(
        without_std, torch.tensor([[-1.0, -1], [1, 1], [-2, 0], [-2, -2], [4, 0]])
    )


def test_grpo_of_a_batch_without_rows_is_empty():
    advantages, _ = compute_grpo_outcome_advantage(
        torch.zeros(0, 3), torch.zeros(0, 3), np.array([], dtype=object)
    )
    assert advantages.shape == (0, 3)


def test_grpo_adds_epsilon_to_the_standard_deviation():
    # scores 0 and 2e-6: mean 1e-6, unbiased std sqrt(2) 1e-6, so epsilon counts nearly as much
    advantages, _ = compute_grpo_outcome_advantage(
        torch.tensor([[0.0], [2e-6]]), torch.ones(2, 1), np.array(["a", "a"], dtype=object)
    )
    torch.testing.assert_close(advantages, torch.tensor([[-1.0], [1.0]]) / (2**0.5 + 1))


def test_grpo_gives_a_prompt_with_one_row_its_raw_score():
    advantages, _ = compute_grpo_outcome_advantage(
        torch.tensor([[0.0, 0.5], [0.0, 2.0]]), torch.ones(2, 2), np.array(["a", "b"], dtype=object)
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.5], [2.0, 2.0]]) / (1 + 1e-6))


@pytest.mark.parametrize("norm", [True, False])
def test_grpo_gives_zero_to_the_only_scored_row_of_a_larger_group(norm):
    mask = torch.tensor([[1, 1], [0, 0], [0, 0]])
    advantages, _ = compute_grpo_outcome_advantage(
        torch.full((3, 2), 5.0),
        mask,
        np.array(["a", "a", "a"], dtype=object),
        norm_adv_by_std_in_grpo=norm,
    )
    assert torch.equal(advantages, torch.zeros(3, 2))


def test_grpo_leaves_skipped_rows_out_of_the_group_and_gives_them_zero():
    # Scored rows 1 and 3: mean 2, std sqrt(2). The skipped row's reward of 100 (and NaN) must not
    # be seen.
    rewards = torch.tensor([[1.0, 0.0], [3.0, 0.0], [100.0, NAN]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["a"] * 3, dtype=object))
    a = 1 / (2**0.5 + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([[-a, -a], [a, a], [0.0, 0.0]]))


def test_grpo_of_equal_scores_is_exactly_zero():
    # Added up in float32, eight times 0.1 is off by one ulp: divided by 1e-6 that would be an
    # advantage of -0.007.
    rewards = torch.full((8, 1), 0.1)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, torch.ones(8, 1), np.array(["a"] * 8, dtype=object)
    )
    assert torch.equal(advantages, torch.zeros(8, 1))


@pytest.mark.parametrize("norm", [True, False])
def test_grpo_matches_the_numpy_reference_on_shuffled_groups_of_all_kinds(norm):
    generator = torch.Generator().manual_seed(1)
    index = np.array(
        ["0-1", "0-2", "0-1", "0-3", "0-2", "0-1", "0-4", "0-4", "0-2", "0-5", "0-5"], dtype=object
    )
    rewards = torch.randn(len(index), 7, generator=generator)
    mask = (torch.rand(len(index), 7, generator=generator) < 0.7).long()
    mask[[2, 6]] = 0  # 0-1 keeps two rows, 0-4 keeps one; 0-3 has one row by design
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=norm
    )
    expected = grpo_reference(rewards.numpy(), mask.numpy(), index, 1e-6, norm)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-6)


def estimate(name, **changes):
    fields = {
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 3.0]]),
        "response_mask": torch.ones(2, 2, dtype=torch.long),
        "values": torch.zeros(2, 2),
        "index": np.array(["a", "a"], dtype=object),
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": False,
    }
    return estimate_advantages(get_adv_estimator_fn(name), fields | changes)


def test_registered_estimators_run_the_named_functions_with_the_given_settings():
    advantages, _ = estimate("grpo")
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    _, returns = estimate("gae", gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.5, 1.0], [1.5, 3.0]]))


def test_estimators_say_which_input_is_missing():
    with pytest.raises(ValueError, match="compute_gae_advantage_return needs values"):
        estimate("gae", values=None)
    with pytest.raises(ValueError, match="compute_grpo_outcome_advantage needs index"):
        estimate("grpo", index=None)


def test_inputs_of_unequal_shapes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"response_mask has shape \(2, 1\)"):
        estimate("grpo", response_mask=torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"values has shape \(1, 2\)"):
        estimate("gae", values=torch.ones(1, 2))
    with pytest.raises(
        ValueError, match=r"index has shape \(3,\) but token_level_rewards has \(2, "
    ):
        estimate("grpo", index=np.array(["a", "a", "b"], dtype=object))


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown advantage estimator 'gea'; did you mean gae\? Known are .*grpo"
    ):
        get_adv_estimator_fn("gea")


def test_an_estimator_of_a_plugin_is_found_by_name_and_a_taken_name_is_refused(monkeypatch):
    # The copy keeps the library's own registry as it is.
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "entries", dict(ADVANTAGE_ESTIMATORS.entries))

    @register_adv_est("raw_reward")
    def raw_reward(token_level_rewards):
        return token_level_rewards, token_level_rewards

    assert get_adv_estimator_fn("raw_reward") is raw_reward
    for taken in ("raw_reward", "grpo"):
        with pytest.raises(ValueError, match=f"'{taken}' is already registered"):
            register_adv_est(taken)(raw_reward)


def test_two_names_of_verl_are_one_estimator_and_both_are_taken():
    for alias, name in (("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo")):
        assert get_adv_estimator_fn(alias) is get_adv_estimator_fn(name)
        with pytest.raises(ValueError, match=f"Known are .*{name}, .*{alias}, "):
            get_adv_estimator_fn("unheard_of")
        with pytest.raises(ValueError, match=f"'{alias}' is already registered"):
            register_adv_est(alias)(lambda token_level_rewards: token_level_rewards)


def test_a_required_parameter_that_nobody_provides_is_refused_where_it_is_registered():
    def needs_vaules(token_level_rewards, vaules):
        return token_level_rewards, vaules

    with pytest.raises(ValueError, match=r"requires the parameter 'vaules'.*did you mean values"):
        register_adv_est("needs_vaules")(needs_vaules)

    def needs_something_else(token_level_rewards, zzz):
        return token_level_rewards, zzz

    with pytest.raises(
        ValueError, match=r"'zzz', which is none of .* name, which are .*old_log_probs.*values$"
    ):
        register_adv_est("needs_something_else")(needs_something_else)


def test_an_estimator_of_a_plugin_that_compares_rows_is_known_as_one(monkeypatch):
    for name in ("entries", "over_batch"):
        monkeypatch.setattr(ADVANTAGE_ESTIMATORS, name, getattr(ADVANTAGE_ESTIMATORS, name).copy())
    for name, over_batch in (("minus_the_mean", True), ("as_it_is", False)):
        register_adv_est(name, over_batch=over_batch)(
            lambda token_level_rewards: (token_level_rewards,) * 2
        )
    assert {"minus_the_mean", "as_it_is"} & ADVANTAGE_ESTIMATORS.over_batch == {"minus_the_mean"}


def gae_recurrence(
    rewards: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes advantages before whitening, and returns, (B, R), as they are defined: token by
    token from the last to the first."""
    num_rows, length = values.shape
    advantages = torch.zeros_like(values)
    returns = torch.zeros_like(values)
    next_advantage = values.new_zeros(num_rows)
    next_value = values.new_zeros(num_rows)
    for t in reversed(range(length)):
        value = values[:, t]
        is_valid = valid[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(is_valid, advantage, 0.0)
        returns[:, t] = torch.where(is_valid, advantage + value, 0.0)
        next_advantage = torch.where(is_valid, advantage, next_advantage)
        next_value = torch.where(is_valid, value, next_value)
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_the_kernel_of_gae_equals_its_recurrence(gamma, lam):
    generator = torch.Generator().manual_seed(2)
    rewards, values = (
        torch.randn(5, 150, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    valid = torch.rand(5, 150, generator=generator) < 0.8
    valid[0] = False
    rewards[:, 3] = torch.where(valid[:, 3], rewards[:, 3], NAN)
    of_kernel = gae_in_blocks(rewards, values, valid, gamma, lam)
    for fast, defined in zip(
        of_kernel, gae_recurrence(rewards, values, valid, gamma, lam), strict=True
    ):
        torch.testing.assert_close(fast, defined, rtol=1e-12, atol=1e-12)
        assert defined.abs().sum() > 0
