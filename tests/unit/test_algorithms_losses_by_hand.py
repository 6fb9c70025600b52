"""Policy losses on cases whose numbers are derived here."""

import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from verl_like.algorithms.aggregation import BatchCounts
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.policy_losses.clip_cov import ClipCovOptions
from verl_like.algorithms.policy_losses.distillation import DistillationOptions
from verl_like.algorithms.policy_losses.dro import DroOptions
from verl_like.algorithms.policy_losses.kl_cov import KlCovOptions
from verl_like.algorithms.policy_losses.sapo import SapoOptions

LOG2 = math.log(2)


def loss_and_gradient(
    name, old_probs, probs, advantages, *, low=0.2, high=0.2, c=3.0, mask=None, **more
):
    """Of one row of tokens with these probabilities; the mean over its tokens."""
    log_prob = torch.tensor([probs], dtype=torch.float64).log().requires_grad_()
    config = SimpleNamespace(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    loss, metrics = get_policy_loss_fn(name)(
        torch.tensor([old_probs], dtype=torch.float64).log(),
        log_prob,
        torch.tensor([advantages], dtype=torch.float64),
        torch.ones(1, len(probs), dtype=torch.long) if mask is None else torch.tensor([mask]),
        "seq-mean-token-mean",
        config,
        counts=BatchCounts(),
        **more,
    )
    loss.backward()
    return loss.item(), log_prob.grad[0].tolist(), metrics


@pytest.mark.parametrize(
    ("name", "case", "loss", "gradient"),
    [
        # The ratios 4 and 1 have the geometric mean 2, above 1 + 0.5; a negative advantage is not
        # clipped above.
        (
            "gspo",
            {"old_probs": [0.1, 0.5], "probs": [0.4, 0.5], "advantages": [1.0, 1.0], "high": 0.5},
            -1.5,
            [0, 0],
        ),
        (
            "gspo",
            {"old_probs": [0.1, 0.5], "probs": [0.4, 0.5], "advantages": [-1.0, -1.0], "high": 0.5},
            2,
            [1, 1],
        ),
        # The weight 2 is clipped to 1.2, and the token keeps that much gradient.
        ("cispo", {"old_probs": [0.25], "probs": [0.5], "advantages": [1.0]}, 1.2 * LOG2, [-1.2]),
        # At ratio 1 the gate is 4 / 2 * sigmoid(0) = 1, and its slope 1.
        (
            "sapo",
            {
                "old_probs": [0.5],
                "probs": [0.5],
                "advantages": [3.0],
                "options": SapoOptions(tau_pos=2.0, tau_neg=9.0),
            },
            *(-3, [-3]),
        ),
        # 0.6 - 0.3 exceeds 0.2: upwards the token is left out, downwards its ratio 2 is the weight.
        ("dppo_tv", {"old_probs": [0.3], "probs": [0.6], "advantages": [1.0]}, 0, [0]),
        (
            "dppo_tv",
            {"old_probs": [0.3], "probs": [0.6], "advantages": [-1.0]},
            2 * math.log(0.6),
            [2],
        ),
        (
            "dppo_tv",
            {"old_probs": [0.05], "probs": [0.2], "advantages": [2.0], "c": 3.0},
            6 * math.log(5),
            [-6],
        ),
        # KL(1/2 to 1/4) = (log 2 + log(2/3)) / 2 = 0.1438.
        (
            "dppo_kl",
            {"old_probs": [0.5], "probs": [0.25], "advantages": [-1.0], "low": 0.14},
            0,
            [0],
        ),
        (
            "dppo_kl",
            {"old_probs": [0.5], "probs": [0.25], "advantages": [-1.0], "low": 0.15},
            -LOG2,
            [0.5],
        ),
        # A token that became certain: 0.999 log 0.999 + 0.001 log(0.001 / 1e-8) = 0.0105.
        (
            "dppo_kl",
            {"old_probs": [0.999], "probs": [1.0], "advantages": [1.0], "high": 0.011},
            0,
            [-1 / 0.999],
        ),
        # Log-ratios log 4 and 0: clipped to 0.4 the mean is 0.2; not clipped for A < 0 it is log 2.
        (
            "geo_mean",
            {"old_probs": [0.1, 0.5], "probs": [0.4, 0.5], "advantages": [2.0, 2.0], "high": 0.4},
            *(-2 * math.exp(0.2), [0, -math.exp(0.2)]),
        ),
        (
            "geo_mean",
            {"old_probs": [0.1, 0.5], "probs": [0.4, 0.5], "advantages": [-2.0, -2.0], "high": 0.4},
            4,
            [2, 2],
        ),
        ("gpg", {"old_probs": [0.9], "probs": [0.5], "advantages": [2.0]}, 2 * LOG2, [-2]),
        ("reinforce", {"old_probs": [0.9], "probs": [0.5], "advantages": [2.0]}, 2 * LOG2, [-2]),
        # 2 log 2 + 0.25 (log 2)^2, with the slope 0.5 log 2 - 2.
        (
            "dro",
            {
                "old_probs": [0.25],
                "probs": [0.5],
                "advantages": [2.0],
                "options": DroOptions(dro_beta=0.5),
            },
            *(2 * LOG2 + 0.25 * LOG2**2, [0.5 * LOG2 - 2]),
        ),
        # Ratio 2 is above 1.2: the first token is clipped and not left out, the second is left out,
        # the third counts.
        (
            "clip_cov",
            {
                "old_probs": [0.25, 0.5, 0.5],
                "probs": [0.5, 0.5, 0.5],
                "advantages": [3.0, 3.0, 3.0],
                "selected_tokens": torch.tensor([[True, True, False]]),
                "options": ClipCovOptions(),
            },
            *((-3.6 - 3) / 3, [0, 0, -1]),
        ),
        # Both tokens: -A r = -6; the first also 0.5 log 2, with the slope 0.5.
        (
            "kl_cov",
            {
                "old_probs": [0.25, 0.25],
                "probs": [0.5, 0.5],
                "advantages": [3.0, 3.0],
                "selected_tokens": torch.tensor([[True, False]]),
                "options": KlCovOptions(ppo_kl_coef=0.5),
            },
            *(-6 + 0.25 * LOG2, [-2.75, -3]),
        ),
    ],
)
def test_a_loss_equals_the_hand_derived_number_and_slope(name, case, loss, gradient):
    found, slope, _ = loss_and_gradient(name, **case)
    assert found == pytest.approx(loss, abs=1e-12)
    assert slope == pytest.approx(gradient, abs=1e-7)  # dppo_kl adds 1e-8 to probabilities


@pytest.mark.parametrize(
    ("options", "loss", "slope"),
    [
        # The teacher finds the token twice as likely: its advantage is log 2, at ratio 1.
        ({"use_task_rewards": False}, -LOG2, -LOG2),
        ({"use_task_rewards": False, "loss_max_clamp": 0.5}, -0.5, -0.5),
        ({"use_task_rewards": True, "distillation_loss_coef": 2.0}, -2 * LOG2 - 5, -2 * LOG2 - 5),
    ],
)
def test_distillation_learns_from_the_teacher_and_if_asked_from_the_task(options, loss, slope):
    found, gradient, metrics = loss_and_gradient(
        "distillation",
        [0.25],
        [0.25],
        [5.0],
        teacher_log_prob=torch.tensor([[math.log(0.5)]], dtype=torch.float64),
        options=DistillationOptions(**options),
    )
    assert (found, gradient[0]) == pytest.approx((loss, slope))
    assert metrics["distillation/kl"].item() == pytest.approx(-LOG2)
    assert ("actor/pg_clipfrac" in metrics) == options["use_task_rewards"]


# Mean advantage 0 and mean log-probability -2 over the four tokens of the mask: covariances 1, 0,
# -2, -1.
BATCH = (
    torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -1.0]]),
    torch.tensor([[1.0, -1.0, 50.0], [1.0, 50.0, -1.0]]),
    torch.tensor([[1, 1, 0], [1, 0, 1]]),
)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.01, [[0, 0]]), (0.5, [[0, 0], [0, 1]]), (1.0, None)]
)
def test_kl_cov_selects_the_tokens_of_the_largest_covariance(share, expected):
    selected = KlCovOptions(kl_cov_ratio=share).select_tokens(*BATCH)
    assert selected.nonzero().tolist() == (
        BATCH[2].nonzero().tolist() if expected is None else expected
    )


def test_clip_cov_draws_among_the_tokens_in_the_band():
    all_of_band = ClipCovOptions(
        clip_cov_ratio=1.0, clip_cov_lb=-1.5, clip_cov_ub=0.5
    ).select_tokens(*BATCH)
    assert all_of_band.nonzero().tolist() == [[0, 1], [1, 2]]
    options = ClipCovOptions(clip_cov_ratio=0.25, clip_cov_lb=-1.5, clip_cov_ub=0.5)
    draws = [
        options.select_tokens(*BATCH, torch.Generator().manual_seed(seed))
        for seed in (0, 0, *range(20))
    ]
    assert {int(draw.sum()) for draw in draws} == {1}
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(torch.stack(draws).any(0), all_of_band)
    assert not ClipCovOptions(clip_cov_lb=3.0).select_tokens(*BATCH).any()


def test_a_batch_without_tokens_selects_none():
    nothing = torch.zeros(2, 3, dtype=torch.long)
    for options in (KlCovOptions(), ClipCovOptions()):
        assert not options.select_tokens(BATCH[0], BATCH[1], nothing).any()


def test_dro_without_its_beta_is_refused():
    with pytest.raises(ValidationError, match="loss_mode=dro needs dro_beta"):
        DroOptions()
