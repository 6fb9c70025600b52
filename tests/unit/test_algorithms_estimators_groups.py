"""Estimators that compare the total rewards of a prompt's responses: by hand, and against a float64
NumPy reference."""

import estimator_oracles as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.algorithms.advantages.dr_grpo import compute_dr_grpo_outcome_advantage
from verl_like.algorithms.advantages.gdpo import GDPOOptions, compute_gdpo_outcome_advantage
from verl_like.algorithms.advantages.gpg import compute_gpg_outcome_advantage
from verl_like.algorithms.advantages.grpo import (
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)
from verl_like.algorithms.advantages.grpo_passk import compute_grpo_passk_outcome_advantage
from verl_like.algorithms.advantages.max_rl import compute_max_rl_outcome_advantage
from verl_like.algorithms.advantages.opo import compute_opo_outcome_advantage
from verl_like.algorithms.advantages.reinforce_plus_plus_baseline import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
)
from verl_like.algorithms.advantages.rloo import (
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)

law = settings(max_examples=20, deadline=None, derandomize=True)


def gdpo_of_one_reward(rewards, mask, index):
    return compute_gdpo_outcome_advantage(
        {"rule": rewards}, mask, index, GDPOOptions(gdpo_reward_keys=["rule"])
    )


def passk_without_std(rewards, mask, index):
    return compute_grpo_passk_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)


def by_row(advantage_of):
    return lambda batch: oracle.outcome_advantages(batch, advantage_of)


def then_whitened(advantage_of):
    return lambda batch: oracle.whitened(oracle.outcome_advantages(batch, advantage_of), batch)


ESTIMATORS = {
    "dr_grpo": (compute_dr_grpo_outcome_advantage, by_row(oracle.dr_grpo)),
    "grpo": (compute_grpo_outcome_advantage, by_row(oracle.grpo)),
    "grpo_vectorized": (compute_grpo_vectorized_outcome_advantage, by_row(oracle.grpo)),
    "grpo_passk": (compute_grpo_passk_outcome_advantage, by_row(oracle.pass_at_k_over_std)),
    "grpo_passk without std": (passk_without_std, by_row(oracle.pass_at_k)),
    "rloo": (compute_rloo_outcome_advantage, by_row(oracle.rloo)),
    "rloo_vectorized": (compute_rloo_vectorized_outcome_advantage, by_row(oracle.rloo)),
    "opo": (compute_opo_outcome_advantage, by_row(oracle.opo)),
    "gpg": (compute_gpg_outcome_advantage, oracle.gpg),
    "max_rl": (compute_max_rl_outcome_advantage, by_row(oracle.max_rl)),
    "reinforce_plus_plus_baseline": (
        compute_reinforce_plus_plus_baseline_outcome_advantage,
        then_whitened(oracle.dr_grpo),
    ),
    "gdpo": (gdpo_of_one_reward, then_whitened(oracle.grpo)),
}
WHITENED = ("reinforce_plus_plus_baseline", "gdpo")

# Two groups of scores 1, 3, 5 (1, 2 and 1 tokens) and 0, 4 (2 and 3 tokens); the last column is
# never a response token.
REWARDS = torch.tensor([[1.0, 9, 9, 9], [1, 2, 9, 9], [9, 5, 9, 9], [0, 0, 9, 9], [1, 1, 2, 9]])
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
INDEX = np.array(["a", "a", "a", "b", "b"], dtype=object)


def at_tokens(*row_values):
    return torch.tensor(row_values).unsqueeze(-1) * MASK


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", at_tokens(-2.0, 0.0, 2.0, -2.0, 2.0)),  # means 3 and 2
        # unbiased std of 1, 3, 5: sqrt(8 / 2) = 2; of 0, 4: sqrt(8)
        (
            "grpo",
            at_tokens(
                -2 / (2 + 1e-6), 0.0, 2 / (2 + 1e-6), -2 / (8**0.5 + 1e-6), 2 / (8**0.5 + 1e-6)
            ),
        ),
        # the best is 5, the second 3: (5 - 3) / 2; the best is 4, the second 0: 4 / sqrt(8)
        ("grpo_passk", at_tokens(0.0, 0.0, 2 / (2 + 1e-6), 0.0, 4 / (8**0.5 + 1e-6))),
        ("grpo_passk without std", at_tokens(0.0, 0.0, 2.0, 0.0, 4.0)),
        # the others' means: (3 + 5) / 2, (1 + 5) / 2, (1 + 3) / 2; 4 and 0
        ("rloo", at_tokens(-3.0, 0.0, 3.0, -4.0, 4.0)),
        # baselines (1 * 1 + 2 * 3 + 1 * 5) / 4 = 3 and (2 * 0 + 3 * 4) / 5 = 2.4
        ("opo", at_tokens(-2.0, 0.0, 2.0, -2.4, 1.6)),
        ("gpg", at_tokens(-2.0, 0.0, 2.0, -2.0, 2.0)),  # both groups have a gradient: alpha = 1
        ("max_rl", at_tokens(-2 / 3, 0.0, 2 / 3, -1.0, 1.0)),
        # deviations -2; 0, 0; 2; -2, -2; 2, 2, 2 at the 9 tokens: mean 2 / 9, sum of squares 28 - 9
        # * (2 / 9)^2
        (
            "reinforce_plus_plus_baseline",
            (at_tokens(-2.0, 0.0, 2.0, -2.0, 2.0) - at_tokens(*5 * [2 / 9]))
            / ((28 - 4 / 9) / 8 + 1e-8) ** 0.5,
        ),
    ],
)
def test_estimator_of_two_groups_equals_the_hand_derived_numbers(name, expected):
    advantages, returns = ESTIMATORS[name][0](REWARDS, MASK, INDEX)
    torch.testing.assert_close(advantages, expected)
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize("name", ESTIMATORS)
@law
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_estimator_matches_the_numpy_reference_with_holes_skipped_rows_and_groups_of_all_kinds(
    name, seed, dtype
):
    function, reference = ESTIMATORS[name]
    batch = oracle.random_batch(seed, least=0.0 if name == "max_rl" else -2.0)
    advantages, returns = function(
        torch.from_numpy(batch.rewards).to(dtype), torch.from_numpy(batch.mask).long(), batch.index
    )
    assert advantages.dtype == returns.dtype == dtype
    np.testing.assert_allclose(advantages.numpy(), reference(batch), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("score", [0.1, 1.0, 0.0])
def test_groups_of_equal_scores_give_exactly_zero(name, score):
    rewards, mask = torch.zeros(14, 3), torch.ones(14, 3, dtype=torch.long)
    rewards[:, 0] = score
    mask[::2, 2] = 0
    advantages, _ = ESTIMATORS[name][0](
        rewards, mask, np.array(["a"] * 7 + ["b"] * 7, dtype=object)
    )
    assert torch.equal(advantages, torch.zeros(14, 3))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in WHITENED])
def test_a_prompt_with_one_row_gets_its_score(name):
    advantages, _ = ESTIMATORS[name][0](
        torch.tensor([[0.0, 0.5], [0.0, 2.0]]), torch.ones(2, 2), np.array(["a", "b"], dtype=object)
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.5], [2.0, 2.0]]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_only_scored_row_of_a_larger_group_gets_zero_and_changes_no_other_row(name):
    rewards, mask = torch.cat([REWARDS, torch.full((2, 4), 7.0)]), torch.cat([MASK, MASK[:2]])
    mask[6] = 0
    index = np.append(INDEX, np.array(["c", "c"], dtype=object))
    advantages, _ = ESTIMATORS[name][0](rewards, mask, index)
    assert torch.equal(advantages[5:], torch.zeros(2, 4))
    alone, _ = ESTIMATORS[name][0](REWARDS, MASK, INDEX)
    # alpha of gpg: a scored row without a gradient
    torch.testing.assert_close(advantages[:5], alone * (6 / 5 if name == "gpg" else 1))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_of_an_empty_batch_and_of_skipped_rows_is_zero(name):
    none = np.array([], dtype=object)
    assert ESTIMATORS[name][0](torch.zeros(0, 3), torch.zeros(0, 3), none)[0].shape == (0, 3)
    skipped, _ = ESTIMATORS[name][0](REWARDS, torch.zeros_like(MASK), INDEX)
    assert torch.equal(skipped, torch.zeros(5, 4))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_has_no_gradient_and_leaves_its_inputs_unchanged(name):
    rewards, mask = REWARDS.clone().requires_grad_(), MASK.clone()
    advantages, returns = ESTIMATORS[name][0](rewards, mask, INDEX)
    assert not advantages.requires_grad and not returns.requires_grad
    assert torch.equal(rewards, REWARDS) and torch.equal(mask, MASK)


def test_two_best_responses_of_a_prompt_add_nothing_to_each_other():
    advantages, _ = compute_grpo_passk_outcome_advantage(
        torch.tensor([[3.0], [3.0], [1.0]]), torch.ones(3, 1), np.array(["a"] * 3, dtype=object)
    )
    assert torch.equal(advantages, torch.zeros(3, 1))


def test_gpg_makes_up_for_the_groups_without_a_gradient():
    # Scores 0, 1 and 1, 1: half of the rows have a gradient, so alpha = 2. The wrong response is
    # one of them.
    advantages, _ = compute_gpg_outcome_advantage(
        torch.tensor([[0.0], [1.0], [1.0], [1.0]]),
        torch.ones(4, 1),
        np.array([*"aabb"], dtype=object),
        f_norm=4.0,
    )
    assert torch.equal(advantages, torch.tensor([[-0.25], [0.25], [0.0], [0.0]]))
    given, _ = compute_gpg_outcome_advantage(
        torch.tensor([[0.0], [1.0]]), torch.ones(2, 1), np.array([*"aa"], dtype=object), alpha=3.0
    )
    assert torch.equal(given, torch.tensor([[-1.5], [1.5]]))


def test_gpg_finds_no_gradient_where_equal_scores_have_a_rounded_mean():
    # Eight times 0.1 in float64 has the mean 0.09999999999999999; a fifth of the rows have a
    # gradient.
    rewards = torch.tensor([[0.1]] * 8 + [[0.0], [1.0]], dtype=torch.float64)
    index = np.array(["a"] * 8 + ["b"] * 2, dtype=object)
    advantages, _ = compute_gpg_outcome_advantage(rewards, torch.ones(10, 1), index)
    torch.testing.assert_close(advantages[8:], torch.tensor([[-2.5], [2.5]], dtype=torch.float64))


def test_max_rl_of_one_success_in_eight_is_seven_and_refuses_a_negative_score():
    # mean 1 / 8: (1 - 1 / 8) * 8 = 7 for the success, (0 - 1 / 8) * 8 = -1 for the failures
    rewards, index = torch.zeros(8, 1), np.array(["a"] * 8, dtype=object)
    rewards[3] = 1
    advantages, _ = compute_max_rl_outcome_advantage(rewards, torch.ones(8, 1), index)
    assert torch.equal(advantages, 8 * rewards - 1)
    with pytest.raises(ValueError, match=r"a score of -0\.25: give rewards of at least 0"):
        compute_max_rl_outcome_advantage(rewards - 0.25, torch.ones(8, 1), index)


def test_gdpo_normalises_each_reward_before_the_weighted_sum():
    # The rewards normalise to (-1, 1) / sqrt(2) and (1, -1) / sqrt(2): with weights 1 and 3 they
    # sum to (2, -2) / sqrt(2), whitened over one token each: (1, -1) / sqrt(2). GRPO of the sum
    # would see the reward of 100 alone.
    correct, brief = torch.tensor([[0.0], [100.0]]), torch.tensor([[0.2], [0.1]])
    rewards, index = (
        {"brief": brief, "length": brief * 7, "correct": correct},
        np.array([*"aa"], dtype=object),
    )
    options = GDPOOptions(gdpo_reward_keys=["correct", "brief"], gdpo_reward_weights=[1.0, 3.0])
    advantages, _ = compute_gdpo_outcome_advantage(rewards, torch.ones(2, 1), index, options)
    torch.testing.assert_close(advantages, torch.tensor([[1.0], [-1.0]]) / 2**0.5)
    without_std, _ = compute_gdpo_outcome_advantage(
        rewards, torch.ones(2, 1), index, options, norm_adv_by_std_in_grpo=False
    )
    torch.testing.assert_close(without_std, torch.tensor([[-1.0], [1.0]]) / 2**0.5)


def test_gdpo_of_two_rewards_matches_the_numpy_reference():
    one, other = oracle.random_batch(3), oracle.random_batch(3, outcome=True)
    other.rewards = np.where(other.mask, other.rewards**2, np.nan).astype(np.float32)
    expected = oracle.outcome_advantages(one, oracle.grpo) + 0.5 * oracle.outcome_advantages(
        other, oracle.grpo
    )
    advantages, _ = compute_gdpo_outcome_advantage(
        {"one": torch.from_numpy(one.rewards), "other": torch.from_numpy(other.rewards)},
        torch.from_numpy(one.mask),
        one.index,
        GDPOOptions(gdpo_reward_keys=["one", "other"], gdpo_reward_weights=[1.0, 0.5]),
    )
    np.testing.assert_allclose(
        advantages.numpy(), oracle.whitened(expected, one), rtol=1e-5, atol=1e-5
    )


def test_gdpo_takes_a_row_that_lacks_a_reward_as_skipped_for_that_reward_alone():
    # One token each. Reward one is 0, 2, 4: normalised -1, 0, 1. Of reward two the second row has
    # none and the others have 3 and 1: normalised 1 and -1 over sqrt(2), and 0. In group b the only
    # reward two is no comparison.
    half = 2**-0.5
    rewards = {
        "one": torch.tensor([[0.0], [2.0], [4.0], [1.0], [3.0]]),
        "two": torch.tensor([[3.0], [torch.nan], [1.0], [torch.nan], [9.0]]),
    }
    options = GDPOOptions(gdpo_reward_keys=["one", "two"], gdpo_reward_weights=[1.0, 2.0])
    index = np.array([*"aaabb"], dtype=object)
    advantages, _ = compute_gdpo_outcome_advantage(rewards, torch.ones(5, 1), index, options)
    summed = np.array([-1 + 2 * half, 0.0, 1 - 2 * half, -half, half])
    expected = (summed - summed.mean()) / summed.std(ddof=1)
    np.testing.assert_allclose(advantages[:, 0].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_gdpo_leaves_out_the_rows_that_have_no_reward_to_compare():
    # The third row lacks both rewards; the last of group b is alone with its own. The others are -1
    # and 1 over sqrt(2).
    rewards = {
        "one": torch.tensor([[0.0], [2.0], [torch.nan], [5.0], [torch.nan]]),
        "two": torch.tensor([[torch.nan], [torch.nan], [torch.nan], [torch.nan], [4.0]]),
    }
    options, index = (
        GDPOOptions(gdpo_reward_keys=["one", "two"]),
        np.array([*"aaabb"], dtype=object),
    )
    advantages, _ = compute_gdpo_outcome_advantage(rewards, torch.ones(5, 1), index, options)
    half = 2**-0.5
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-half, half, 0.0, 0.0, 0.0]))


def test_gdpo_refuses_rewards_and_weights_that_do_not_fit():
    with pytest.raises(ValueError, match="names taste, but the rewards of this run are rule"):
        options = GDPOOptions(gdpo_reward_keys=["taste"])
        compute_gdpo_outcome_advantage({"rule": REWARDS}, MASK, INDEX, options)
    with pytest.raises(ValueError, match="has 1 weights for the 2 rewards"):
        GDPOOptions(gdpo_reward_keys=["rule", "taste"], gdpo_reward_weights=[1.0])
    with pytest.raises(ValueError, match="gdpo_reward_keys is empty"):
        GDPOOptions()
    with pytest.raises(ValueError, match="names a reward twice"):
        GDPOOptions(gdpo_reward_keys=["rule", "rule"])
