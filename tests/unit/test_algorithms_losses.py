"""Policy, value and entropy losses against hand-derived numbers, a NumPy reference and numerical
gradients."""

import copy
import inspect
import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_like.algorithms.aggregation import LOSS_AGG_MODES, BatchCounts, agg_loss
from verl_like.algorithms.masked import masked_sum
from verl_like.algorithms.policy_losses import (
    POLICY_LOSSES,
    ConfigBesideCounts,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl_like.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla
from verl_like.algorithms.value_loss import compute_value_loss
from verl_like.workers.config.roles import ActorConfig

NAN, INF = float("nan"), float("inf")


def counts_of(mask, scale=None):
    """The counts of `mask`, taken as the whole mini-batch."""
    return BatchCounts(
        batch_num_tokens=float(mask.sum()),
        global_batch_size=float(mask.bool().any(dim=-1).sum()),
        loss_scale_factor=scale,
    )


def aggregate_over(mask, mode="token-mean", scale=None):
    return partial(agg_loss, loss_agg_mode=mode, **counts_of(mask, scale).arguments)


def compute_policy_loss(
    old,
    log_prob,
    advantages,
    mask,
    low=0.2,
    high=0.2,
    c=3.0,
    mode="token-mean",
    counts=None,
    weights=None,
):
    """The vanilla loss, and its metrics as sums over the selected tokens."""
    config = SimpleNamespace(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    counts = counts or counts_of(mask)
    loss, metrics = compute_policy_loss_vanilla(
        old, log_prob, advantages, mask, mode, config, weights, counts=counts
    )
    assert all(value.shape == mask.shape and not value.requires_grad for value in metrics.values())
    return loss, {name: masked_sum(value.float(), mask) for name, value in metrics.items()}


def random_mask(generator, rows, length):
    mask = (torch.rand(rows, length, generator=generator) < 0.6).long()
    mask[0] = 0
    mask[1] = 1
    return mask


def policy_loss_reference(old, new, advantages, mask, low, high, c):
    """Token by token, with branches instead of max and min; returns the token-mean loss and the
    three sums."""
    total, num_clipped, kl, num_bounded = 0.0, 0, 0.0, 0
    for o, n, a in zip(old[mask], new[mask], advantages[mask], strict=True):
        ratio = math.exp(n - o)
        if a >= 0:
            loss = -a * min(ratio, 1 + high)
            num_clipped += a > 0 and ratio > 1 + high
        else:
            loss = -a * max(ratio, 1 - low)
            num_clipped += ratio < 1 - low
            if loss > -a * c:
                loss, num_bounded = -a * c, num_bounded + 1
        total += loss
        kl += o - n
    return total / mask.sum(), {
        "actor/pg_clipfrac": num_clipped,
        "actor/ppo_kl": kl,
        "actor/pg_clipfrac_lower": num_bounded,
    }


def test_policy_loss_equals_the_hand_derived_numbers_in_each_branch():
    # ratio, advantage -> loss: inside the range; clipped above; A < 0 not clipped above; clipped
    # below; dual clip at 3
    ratios = torch.tensor([[1.1, 2.0, 2.0, 0.5, 5.0]])
    advantages = torch.tensor([[2.0, 2.0, -2.0, -2.0, -2.0]])
    expected = [-2.2, -2.4, 4.0, 1.6, 6.0]
    mask = torch.ones(1, 5, dtype=torch.long)
    loss, metrics = compute_policy_loss(torch.zeros(1, 5), ratios.log(), advantages, mask)
    assert loss.item() == pytest.approx(sum(expected) / 5, rel=1e-6)
    assert metrics["actor/pg_clipfrac"] == 2
    assert metrics["actor/pg_clipfrac_lower"] == 1
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.1 * 2 * 2 * 0.5 * 5), rel=1e-5)
    assert set(metrics) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}


def test_policy_loss_clips_asymmetrically():
    mask = torch.ones(1, 2, dtype=torch.long)
    log_prob = torch.tensor([[2.0, 0.5]]).log()
    loss, _ = compute_policy_loss(
        torch.zeros(1, 2),
        log_prob,
        torch.tensor([[1.0, -1.0]]),
        mask,
        low=0.1,
        high=0.28,
        mode="token-sum",
    )
    assert loss.item() == pytest.approx(-1.28 + 0.9, rel=1e-6)


def test_policy_loss_matches_the_branching_reference_and_its_gradient_is_right():
    generator = torch.Generator().manual_seed(0)
    old, new, advantages = (
        torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = random_mask(generator, 5, 9)

    def loss_of(log_prob):
        return compute_policy_loss(old, log_prob, advantages, mask, low=0.2, high=0.3, c=2.0)

    loss, metrics = loss_of(new)
    expected, expected_metrics = policy_loss_reference(
        old.numpy(), new.numpy(), advantages.numpy(), mask.numpy().astype(bool), 0.2, 0.3, 2.0
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    assert (
        min(expected_metrics["actor/pg_clipfrac"], expected_metrics["actor/pg_clipfrac_lower"]) > 0
    )
    assert torch.autograd.gradcheck(lambda x: loss_of(x)[0], new.requires_grad_())


def test_policy_gradient_on_policy_is_minus_the_advantage_over_the_token_count():
    log_prob = torch.zeros(1, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages = torch.tensor([[1.0, -2.0, 0.5, 7.0]])
    loss, _ = compute_policy_loss(torch.zeros(1, 4), log_prob, advantages, mask)
    loss.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1 / 3, 2 / 3, -0.5 / 3, 0.0]]))


def test_policy_loss_survives_a_ratio_beyond_floating_point():
    mask = torch.ones(1, 2, dtype=torch.long)
    log_prob = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss, _ = compute_policy_loss(
        torch.tensor([[-500.0, -500.0]]),
        log_prob,
        torch.tensor([[1.0, -1.0]]),
        mask,
        mode="token-sum",
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 + 3.0, rel=1e-6)
    assert torch.equal(log_prob.grad, torch.zeros(1, 2))


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_garbage_at_masked_positions_reaches_neither_losses_nor_gradients(garbage):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    clean = torch.tensor([[0.1, 0.2, -0.3], [0.5, 0.5, 0.5]])
    dirty = torch.where(mask.bool(), clean, garbage)

    def policy(x, other):
        return compute_policy_loss(0.5 * x.detach(), x, other, mask)

    def value(x, other):
        return compute_value_loss(x, other, other, mask, 0.5, aggregate=aggregate_over(mask))

    # The garbage stands in all inputs, then in the constant ones alone.
    for function, x in itertools.product((policy, value), (dirty, clean)):
        x_clean, x_dirty = clean.clone().requires_grad_(), x.clone().requires_grad_()
        loss_clean, metrics_clean = function(x_clean, 2 * clean)
        loss_dirty, metrics_dirty = function(x_dirty, 2 * dirty)
        loss_clean.backward()
        loss_dirty.backward()
        assert loss_dirty.item() == loss_clean.item()
        assert metrics_dirty == metrics_clean
        assert torch.equal(x_dirty.grad, x_clean.grad)


def test_value_loss_equals_the_hand_derived_numbers():
    # v = 2, old = 0, R = 3, range 0.5: clipped to 0.5, (0.5 - 3)^2 = 6.25 > 1; v = 2, R = 0: 4 >
    # 0.25, not clipped
    mask = torch.tensor([[1, 1, 0]])
    vpreds = torch.tensor([[2.0, 2.0, 9.0]], requires_grad=True)
    loss, metrics = compute_value_loss(
        vpreds,
        torch.tensor([[3.0, 0.0, 0.0]]),
        torch.zeros(1, 3),
        mask,
        0.5,
        aggregate=aggregate_over(mask),
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (6.25 + 4.0) / 2)
    assert metrics == {"critic/vf_clipfrac": 1.0}
    torch.testing.assert_close(vpreds.grad, torch.tensor([[0.0, 1.0, 0.0]]))


def test_value_loss_matches_numpy_and_its_gradient_is_right():
    generator = torch.Generator().manual_seed(3)
    vpreds, returns, values = (
        torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = random_mask(generator, 4, 6)

    def loss_of(x):
        return compute_value_loss(x, returns, values, mask, 0.4, aggregate=aggregate_over(mask))

    v, r, old, selected = vpreds.numpy(), returns.numpy(), values.numpy(), mask.numpy().astype(bool)
    plain, clipped = (v - r) ** 2, (np.clip(v, old - 0.4, old + 0.4) - r) ** 2
    loss, metrics = loss_of(vpreds)
    assert loss.item() == pytest.approx(
        0.5 * np.maximum(plain, clipped)[selected].mean(), rel=1e-12
    )
    assert metrics["critic/vf_clipfrac"] == (clipped > plain)[selected].sum() > 0
    assert torch.autograd.gradcheck(lambda x: loss_of(x)[0], vpreds.requires_grad_())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 6) / 4),
        ("token-sum", 12.0),
        ("seq-mean-token-sum", (6 + 6) / 2),
        ("seq-mean-token-sum-norm", (6 + 6) / 2 / 5),
        ("seq-mean-token-mean", (2 + 6) / 2),
    ],
)
def test_each_aggregation_mode_equals_the_hand_derived_number(mode, expected):
    loss_mat = torch.tensor([[1.0, 2.0, 3.0], [6.0, NAN, 100.0], [NAN, INF, 100.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert aggregate_over(mask, mode, scale=5.0)(loss_mat, mask).item() == pytest.approx(expected)


def test_the_norm_mode_takes_no_length_from_a_shape():
    loss_mat, mask = torch.tensor([[1.0, 2.0, 3.0, 6.0]]), torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"no loss_scale_factor.*pass data\.max_response_length"):
        agg_loss(loss_mat, mask, "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [2, 3, 1, 6]])
def test_micro_batches_sum_to_the_full_mini_batch_in_loss_and_gradient(mode, sizes):
    generator = torch.Generator().manual_seed(7)
    old, new, advantages = (
        torch.randn(12, 11, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = random_mask(generator, 12, 11)
    counts = counts_of(mask, scale=11.0)

    def loss_of(rows, log_prob):
        return compute_policy_loss(
            old[rows], log_prob[rows], advantages[rows], mask[rows], mode=mode, counts=counts
        )

    whole = new.clone().requires_grad_()
    full_loss, full_metrics = loss_of(slice(0, 12), whole)
    full_loss.backward()

    split = new.clone().requires_grad_()
    total, sums = 0.0, dict.fromkeys(full_metrics, 0.0)
    for rows in torch.randperm(12, generator=generator).split(sizes):
        loss, metrics = loss_of(rows, split)
        loss.backward()
        total += loss.item()
        sums = {name: sums[name] + value.item() for name, value in metrics.items()}
    assert total == pytest.approx(full_loss.item(), rel=1e-12)
    assert sums == pytest.approx(
        {name: value.item() for name, value in full_metrics.items()}, rel=1e-5
    )
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=1e-15)
    assert whole.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_mini_batch_without_tokens_has_zero_loss_and_zero_gradient(mode):
    mask = torch.zeros(2, 3, dtype=torch.long)
    loss_mat = torch.full((2, 3), NAN, requires_grad=True)
    loss = aggregate_over(mask, mode, scale=5.0)(loss_mat, mask)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(loss_mat.grad, torch.zeros(2, 3))


def test_a_zero_count_with_selected_tokens_is_refused():
    with pytest.raises(ValueError, match=r"divides by 0\.0 \(batch_num_tokens=0\.0"):
        agg_loss(
            torch.ones(1, 1),
            torch.ones(1, 1),
            "token-mean",
            batch_num_tokens=0.0,
            global_batch_size=1.0,
        )


def test_an_unknown_aggregation_mode_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, token-sum"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_without_counts_the_mask_is_the_whole_mini_batch_and_dp_size_is_a_factor(mode):
    loss_mat = torch.tensor([[1.0, 2.0, 3.0], [6.0, 7.0, 100.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    expected = aggregate_over(mask, mode, scale=5.0)(loss_mat, mask).item()
    assert agg_loss(loss_mat, mask, mode, loss_scale_factor=5.0).item() == expected != 0
    counts = replace(counts_of(mask, scale=5.0), dp_size=3)
    assert agg_loss(loss_mat, mask, mode, **counts.arguments).item() == pytest.approx(3 * expected)
    with pytest.raises(ValueError, match="dp_size=3, batch_num_tokens=4, global_batch_size=None"):
        agg_loss(loss_mat, mask, mode, dp_size=3, batch_num_tokens=4)


def test_rollout_weights_are_factors_of_the_token_losses():
    # on policy, A = 2 and -1: losses -2 and 1, times 0.5 and 3
    mask = torch.ones(1, 2)
    loss, _ = compute_policy_loss(
        torch.zeros(1, 2),
        torch.zeros(1, 2),
        torch.tensor([[2.0, -1.0]]),
        mask,
        weights=torch.tensor([[0.5, 3.0]]),
    )
    assert loss.item() == pytest.approx((-2 * 0.5 + 1 * 3) / 2)


def test_the_aggregation_that_each_policy_loss_takes_unless_it_is_told_otherwise_exists():
    for name in POLICY_LOSSES.file_names():
        default = inspect.signature(get_policy_loss_fn(name)).parameters["loss_agg_mode"].default
        assert default in LOSS_AGG_MODES, name


def test_policy_losses_are_found_by_name_and_a_taken_name_is_refused(monkeypatch):
    monkeypatch.setattr(POLICY_LOSSES, "entries", dict(POLICY_LOSSES.entries))

    @register_policy_loss("my_loss")
    def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        return agg_loss(
            -advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info
        ), {}

    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla
    assert get_policy_loss_fn("my_loss") is my_loss
    for taken in ("vanilla", "my_loss"):
        with pytest.raises(ValueError, match=f"'{taken}' is already registered"):
            register_policy_loss(taken)(my_loss)
    with pytest.raises(
        ValueError,
        match=r"unknown policy loss 'vanila'; did you mean vanilla\? Known are .*vanilla",
    ):
        get_policy_loss_fn("vanila")


def test_a_loss_may_copy_and_change_its_configuration_and_keeps_the_counts():
    counts = {"batch_num_tokens": 7.0, "dp_size": 2}
    block = ActorConfig(clip_ratio_low=0.25, clip_ratio_high=0.75, loss_agg_mode="token-mean")
    config = ConfigBesideCounts(block, counts)
    changed = config.updated({"clip_ratio_low": 0.125})
    copies = [copy.copy(config), copy.deepcopy(config)]
    for each in (*copies, changed, config.model_copy(update={"clip_ratio_high": 0.5})):
        assert each.global_batch_info == counts
    assert [each.clip_ratio_low for each in (*copies, changed)] == [0.25, 0.25, 0.125]
    assert config.clip_ratio_low == 0.25
