"""Corrections of rollout against trainer: weights, rejection and metrics against NumPy and
hand-derived numbers."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from verl_like.algorithms.corrections import (
    STATISTICS,
    RolloutCorrectionConfig,
    read_band,
    rejection_bounds,
)
from verl_like.algorithms.corrections.correction import (
    compute_rollout_correction_and_rejection_mask,
)
from verl_like.algorithms.corrections.importance_sampling import compute_rollout_correction_weights
from verl_like.algorithms.corrections.off_policy_metrics import compute_offpolicy_metrics
from verl_like.algorithms.corrections.rejection import compute_rollout_rejection_mask

# Ratios of the trainer's to the rollout's probability; what stands at masked positions must not
# matter.
RATIOS = [[4.0, 0.5, math.nan, 1.0], [0.5, 0.25, 1.0, 1.0], [math.inf, math.nan, 0.0, 7.0]]
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
LOG_RATIO = torch.tensor(RATIOS, dtype=torch.float64).log()


def random_batch():
    """Log-ratios (B, R) far into both clamps, a mask with holes and a skipped row, as NumPy
    arrays."""
    rng = np.random.default_rng(3)
    log_ratio, mask = rng.normal(0, 0.4, (7, 8)), rng.random((7, 8)) < 0.7
    log_ratio[1, :2], mask[1, :2], mask[4] = (30.0, -35.0), True, False
    return log_ratio, mask


def clamped(x):
    return min(max(x, -20.0), 20.0)


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 2.0, [[2, 0.5, 0, 1], [0.5, 0.25, 1, 0]]),
        ("token", "0.5_2.0", [[0, 0.5, 0, 1], [0.5, 0, 1, 0]]),
        ("sequence", 1.5, [[1.5, 1.5, 0, 1.5], [0.125, 0.125, 0.125, 0]]),
        ("sequence", "0.5_2.0", [[2, 2, 0, 2], [0, 0, 0, 0]]),
    ],
)
def test_weights_equal_the_hand_derived_numbers(level, threshold, expected):
    weights, _ = compute_rollout_correction_weights(LOG_RATIO, MASK, level, threshold)
    torch.testing.assert_close(
        weights, torch.tensor([*expected, [0, 0, 0, 0]], dtype=torch.float64)
    )


def test_metrics_of_the_weights_equal_the_hand_derived_numbers():
    _, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0)
    # Applied are 2, 1/2, 1 and 1/2, 1/4, 1: the sum is 5.25, that of the squares 6.5625.
    assert metrics == pytest.approx(
        {
            "rollout_is_mean": 5.25 / 6,
            "rollout_is_std": math.sqrt(6.5625 / 6 - (5.25 / 6) ** 2),
            "rollout_is_max": 4.0,
            "rollout_is_min": 0.25,
            "rollout_is_eff_sample_size": 5.25**2 / 6 / 6.5625,
            "rollout_is_ratio_fraction_high": 1 / 6,
            "rollout_is_ratio_fraction_low": 1 / 6,
        }
    )
    _, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, "sequence", "0.5_2.0")
    # The responses' ratios are 2 and 1/8; the second is outside, with half of the six tokens.
    assert metrics["rollout_is_oob_ratio"] == 0.5
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(0.5)
    assert (
        metrics["rollout_is_ratio_fraction_high"],
        metrics["rollout_is_ratio_fraction_low"],
    ) == (0, 0.5)


@pytest.mark.parametrize(("level", "mean"), [("token", 5.25 / 6), ("sequence", (1.5 + 0.125) / 2)])
def test_normalized_weights_have_the_mean_one_over_tokens_or_responses(level, mean):
    threshold = 2.0 if level == "token" else 1.5
    plain, _ = compute_rollout_correction_weights(LOG_RATIO, MASK, level, threshold)
    weights, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, level, threshold, True)
    torch.testing.assert_close(weights, plain / mean)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(mean)


@pytest.mark.parametrize("threshold", [1.3, "0.7_1.3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_their_metrics_equal_numpy(level, threshold):
    log_ratio, mask = random_batch()
    weights, metrics = compute_rollout_correction_weights(
        torch.from_numpy(log_ratio), torch.from_numpy(mask), level, threshold
    )
    expected, raw = np.zeros(mask.shape), []
    for i, t in zip(*np.nonzero(mask), strict=True):
        total = log_ratio[i, t] if level == "token" else log_ratio[i][mask[i]].sum()
        raw.append(math.exp(clamped(total)))
        is_inside = raw[-1] <= 1.3 and (level, threshold) and (threshold == 1.3 or raw[-1] >= 0.7)
        expected[i, t] = raw[-1] if is_inside else 1.3 if threshold == 1.3 else 0.0
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    applied = expected[mask]
    assert metrics["rollout_is_mean"] == pytest.approx(applied.mean())
    assert metrics["rollout_is_std"] == pytest.approx(applied.std())
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(
        applied.mean() ** 2 / (applied**2).mean()
    )
    assert (metrics["rollout_is_max"], metrics["rollout_is_min"]) == pytest.approx(
        (max(raw), min(raw))
    )


# d = -log of the rollout's ratio: log 4, -log 2, 0 in the first row and -log 2, -log 4, 0 in the
# second.
@pytest.mark.parametrize(
    ("statistic", "threshold", "expected"),
    [
        ("token_k1", "0.5_2.0", [[0, 1, 0, 1], [1, 0, 1, 0]]),  # 1/4 and 4 are outside
        ("token_k1", 2.0, [[0, 1, 0, 1], [1, 0, 1, 0]]),
        # (log 4)^2 / 2 = 2 (log 2)^2 is more
        ("token_k2", math.log(2) ** 2, [[0, 1, 0, 1], [1, 0, 1, 0]]),
        # 3 - log 4 = 1.6, and -0.75 + log 4 = 0.64
        ("token_k3", 1.0, [[0, 1, 0, 1], [1, 1, 1, 0]]),
        ("seq_sum_k1", "0.4_6.0", [[1, 1, 0, 1], [0, 0, 0, 0]]),  # ratios 1/2 and 8
        ("seq_mean_k1", "0.9_2.1", [[0, 0, 0, 0], [1, 1, 1, 0]]),  # their cube roots, 0.79 and 2
        ("seq_mean_k1", 1.5, [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_max_k3", 1.0, [[0, 0, 0, 0], [1, 1, 1, 0]]),
        ("token_k2,seq_sum_k1", "0.5, 0.4_6.0", [[0, 1, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_rejection_removes_the_hand_derived_tokens(statistic, threshold, expected):
    kept, metrics = compute_rollout_rejection_mask(LOG_RATIO, MASK, statistic, threshold)
    assert kept.tolist() == [*expected, [0, 0, 0, 0]]
    assert kept.dtype == MASK.dtype
    removed = MASK - kept
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(float(removed.sum()) / 6)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(
        float(removed.any(-1).sum()) / 2
    )


@pytest.mark.parametrize("statistic", STATISTICS)
def test_rejection_and_its_metrics_equal_numpy(statistic):
    log_ratio, mask = random_batch()
    level, _, ending = statistic.rpartition("_")
    largest = {"token": 0.1, "seq_sum": 0.3, "seq_mean": 0.06, "seq_max": 0.2}[level]
    low, high = (0.9, 1.1) if level == "seq_mean" else (0.6, 1.4)
    threshold = f"{low}_{high}" if ending == "k1" else largest
    kept, metrics = compute_rollout_rejection_mask(
        torch.from_numpy(log_ratio), torch.from_numpy(mask), statistic, threshold
    )
    values, expected = np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for i in range(len(mask)):
        d = [clamped(x) for x in log_ratio[i][mask[i]]]
        of_tokens = [{"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[ending] for x in d]
        if level != "token" and d:
            whole = {"seq_sum": sum, "seq_mean": np.mean, "seq_max": max}[level](of_tokens)
            of_tokens = [whole] * len(d)
        values[i][mask[i]] = of_tokens
        inside = [low <= math.exp(v) <= high if ending == "k1" else v <= largest for v in of_tokens]
        expected[i][mask[i]] = inside
    assert kept.numpy().tolist() == expected.tolist()
    assert 0 < expected.sum() < mask.sum()
    prefix = f"rollout_rs_{statistic}"
    assert metrics[f"{prefix}_mean"] == pytest.approx(values[mask].mean())
    assert (metrics[f"{prefix}_max"], metrics[f"{prefix}_min"]) == pytest.approx(
        (values[mask].max(), values[mask].min())
    )
    assert metrics[f"{prefix}_masked_fraction"] == pytest.approx(1 - expected.sum() / mask.sum())


def test_drift_metrics_equal_the_hand_derived_numbers():
    log2 = math.log(2)
    rollout = torch.full_like(LOG_RATIO, -log2)
    metrics = compute_offpolicy_metrics(rollout + LOG_RATIO, rollout, MASK)
    assert metrics == pytest.approx(
        {
            "kl": 2 * log2 / 6,  # d sums to log 2 and -log 8
            "k3_kl": (4 + 0.5 + 1 + 0.5 + 0.25 + 1 + 2 * log2) / 6 - 1,
            "training_ppl": (2 * 2 ** (-1 / 3) + 2 * 2) / 2,
            "rollout_ppl": 2.0,
            "log_ppl_diff": (-log2 / 3 + log2) / 2,
            "log_ppl_abs_diff": (log2 / 3 + log2) / 2,
            "ppl_ratio": (2 ** (-1 / 3) + 2) / 2,
            "chi2_token": (16 + 0.25 + 1 + 0.25 + 0.0625 + 1) / 6 - 1,
            "chi2_seq": (4 + 1 / 64) / 2 - 1,
            "drift_p50": log2,
            "drift_p99": 2 * log2,
            "drift_max": 2 * log2,
        }
    )


def test_weights_are_at_most_2_unless_another_threshold_is_given():
    ratios = torch.tensor([[0.5, 1.75, 2.5, 8.0]])
    weights, _ = compute_rollout_correction_weights(ratios.log(), torch.ones(1, 4))
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.75, 2.0, 2.0]]))


def test_corrections_compose_and_their_metrics_have_one_prefix():
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold=3.0,
        rollout_rs="seq_sum_k1",
        rollout_rs_threshold="0.4_6.0",
    )
    old, rollout = LOG_RATIO - 1, torch.full_like(LOG_RATIO, -1.0)
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old, rollout, MASK, config
    )
    assert weights[0].tolist() == pytest.approx([3, 0.5, 0, 1])
    # Also where the response is rejected
    assert weights[1].tolist() == pytest.approx([0.5, 0.25, 1, 0])
    assert kept.tolist() == [[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert {name.partition("/")[0] for name in metrics} == {"rollout_corr"}
    assert {"rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction"} <= set(
        metrics
    )
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old, rollout, MASK, RolloutCorrectionConfig()
    )
    assert weights is None
    assert kept is MASK
    assert metrics == {}


def test_a_batch_without_tokens_has_no_metrics():
    nothing = torch.zeros_like(MASK)
    for level in ("token", "sequence"):
        weights, metrics = compute_rollout_correction_weights(LOG_RATIO, nothing, level)
        assert not weights.any()
        assert not metrics
    assert compute_rollout_rejection_mask(LOG_RATIO, nothing, "seq_max_k2", 1.0)[1] == {}
    assert compute_offpolicy_metrics(LOG_RATIO, LOG_RATIO, nothing) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bypass_mode": True, "rollout_is": "token"},
            "bypass_mode=true computes no log-probabilities",
        ),
        (
            {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            "bypass_mode=true",
        ),
        ({"rollout_is_batch_normalize": True}, "no effect without rollout_is"),
        ({"rollout_rs_threshold": 2.0}, "no effect without rollout_rs"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0}, "unknown statistic 'token_k4'"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "token_k2 has one bound"),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 0.55}, "give 1 or more"),
        (
            {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
            "3 bounds for the 2 statistics",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 0.0},
            "rollout_is_threshold=0.0: expected a positive",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"}, "the smaller first"),
        ({"rollout_is": "token", "rollout_is_threshold": "0_2.0"}, "expected a positive"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "rollout_is_threshold=two"),
        ({"rollout_is": "geometric"}, "'token' or 'sequence'"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RolloutCorrectionConfig(**settings)


def test_bounds_are_read_as_numbers_or_bands():
    assert read_band(2, "rollout_is_threshold") == (None, 2.0)
    assert read_band("0.5_5.0", "rollout_is_threshold") == (0.5, 5.0)
    assert rejection_bounds("token_k1, seq_sum_k3,token_k1", "1.25,3e-2") == {
        "token_k1": (0.8, 1.25),
        "seq_sum_k3": (None, 0.03),
    }


def test_a_threshold_that_is_no_bound_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"^rollout_is_threshold=2_1: expected a positive number"):
        compute_rollout_correction_weights(LOG_RATIO, MASK, "token", "2_1")
