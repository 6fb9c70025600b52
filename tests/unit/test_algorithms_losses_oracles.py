"""Each policy loss against a NumPy oracle, in value, gradient and metrics, and under every split of
the mini-batch."""

import numpy as np
import pytest
import torch
from loss_oracles import ORACLES, SETTINGS, mini_batch

from verl_like.algorithms.aggregation import BatchCounts
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import call_by_name, options_class

ROWS, LENGTH = 8, 9
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
ONLY_MODE = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}


def batch():
    """Log-probabilities with ratios within, near and far beyond every bound; a mask with holes and
    a skipped row."""
    rng = np.random.default_rng(4)
    old = -rng.exponential(1.5, (ROWS, LENGTH)) - 1e-3
    new = np.minimum(old + rng.normal(0, 0.6, (ROWS, LENGTH)), -1e-3)
    old[0, 1], new[0, 1] = -40.0, -0.5
    old[0, 2], new[0, 2] = -0.5, -40.0
    old[3, :4], new[3, :4] = -60.0, -0.1  # a row whose mean log-ratio is beyond the bound of gspo
    advantages = rng.normal(0, 1, (ROWS, LENGTH))
    advantages[1] = 0.0
    advantages[4, ::2] *= -1
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[2], mask[0, 1:3], mask[3, :4], mask[3, 4:] = False, True, True, False
    columns = {"old": old, "new": new, "advantages": advantages}
    columns |= {
        "selected": rng.random((ROWS, LENGTH)) < 0.4,
        "teacher": -rng.exponential(2.0, (ROWS, LENGTH)),
    }
    return columns, mask, rng.uniform(0.2, 2.0, (ROWS, LENGTH))


class Config:
    """The part of the actor's block that losses read, and the counts of the mini-batch."""

    clip_ratio, clip_ratio_c = SETTINGS.clip_ratio, SETTINGS.clip_ratio_c
    clip_ratio_low, clip_ratio_high = SETTINGS.clip_ratio_low, SETTINGS.clip_ratio_high

    def __init__(self, mask, dp_size=1):
        self.counts = BatchCounts(
            dp_size=dp_size,
            batch_num_tokens=float(mask.sum()),
            global_batch_size=float(mask.any(-1).sum()),
            loss_scale_factor=5.0,
        )


def loss_of(name, columns, mask, config, mode, weights=None, rows=slice(None), log_prob=None):
    """The loss function called by name on some rows, in float64."""
    function = get_policy_loss_fn(name)
    tensors = {column: torch.from_numpy(values)[rows] for column, values in columns.items()}
    options = options_class(function)
    inputs = {
        "old_log_prob": tensors["old"],
        "log_prob": tensors["new"] if log_prob is None else log_prob[rows],
        "advantages": tensors["advantages"],
        "response_mask": torch.from_numpy(mask)[rows],
        "loss_agg_mode": mode,
        "config": config,
        "counts": config.counts,
        "rollout_is_weights": None if weights is None else torch.from_numpy(weights)[rows],
        "selected_tokens": tensors["selected"],
        "teacher_log_prob": tensors["teacher"],
        "options": options
        and options(
            **{
                name: getattr(SETTINGS, name)
                for name in options.model_fields
                if hasattr(SETTINGS, name)
            }
        ),
    }
    return call_by_name(function, inputs)


def cases():
    return [
        (name, mode)
        for name in ORACLES
        for mode in ([ONLY_MODE[name]] if name in ONLY_MODE else MODES)
    ]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_loss_equals_the_oracle_in_value_gradient_and_metrics(name, mode, weighted):
    columns, mask, weights = batch()
    weights = weights if weighted else None
    log_prob = torch.from_numpy(columns["new"]).requires_grad_()
    loss, metrics = loss_of(name, columns, mask, Config(mask), mode, weights, log_prob=log_prob)
    loss.backward()
    expected, gradient, by_token = mini_batch(
        ORACLES[name], columns, mask, mode, 5.0, weights=weights
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(log_prob.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    assert metrics.keys() == by_token.keys()
    for metric, values in metrics.items():
        assert not values.requires_grad
        np.testing.assert_allclose(
            values.double().numpy()[mask], by_token[metric][mask], rtol=1e-12, atol=1e-15
        )
        assert by_token[metric].any(), f"the case does not reach {metric}"


@pytest.mark.parametrize("sizes", [[8], [2] * 4, [1] * 8])
@pytest.mark.parametrize("name", ORACLES)
def test_micro_batches_of_two_ranks_add_up_to_the_whole_mini_batch(name, sizes):
    columns, mask, weights = batch()
    mode = ONLY_MODE.get(name, "token-mean")
    whole, split = (torch.from_numpy(columns["new"]).clone().requires_grad_() for _ in range(2))
    full_loss, _ = loss_of(name, columns, mask, Config(mask), mode, weights, log_prob=whole)
    full_loss.backward()
    total = 0.0
    ranks = torch.arange(ROWS)[::2], torch.arange(ROWS)[1::2]
    for rank in ranks if max(sizes) < ROWS else [torch.arange(ROWS)]:
        for rows in rank.split(sizes[0]):
            # dp_size 2 is for engines that average over their two ranks
            loss, _ = loss_of(
                name, columns, mask, Config(mask, dp_size=2), mode, weights, rows, log_prob=split
            )
            (loss / 2).backward()
            total += loss.item() / 2
    assert total == pytest.approx(full_loss.item(), rel=1e-12)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ORACLES)
def test_garbage_at_masked_positions_reaches_neither_loss_nor_gradient(name, garbage):
    columns, mask, weights = batch()
    mode = ONLY_MODE.get(name, "token-mean")
    dirty = {c: np.where(mask, v, garbage) if v.dtype == float else v for c, v in columns.items()}
    results = []
    for of, w in ((columns, weights), (dirty, np.where(mask, weights, garbage))):
        log_prob = torch.from_numpy(of["new"]).clone().requires_grad_()
        loss, _ = loss_of(name, of, mask, Config(mask), mode, w, log_prob=log_prob)
        loss.backward()
        results.append((loss.item(), log_prob.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ORACLES)
def test_float32_losses_are_finite_where_ratios_leave_the_range_of_the_exponential(name):
    columns, mask, _ = batch()
    columns["old"][0, 1], columns["new"][0, 2] = -500.0, -500.0
    small = {c: v.astype(np.float32) if v.dtype == float else v for c, v in columns.items()}
    log_prob = torch.from_numpy(small["new"]).requires_grad_()
    loss, _ = loss_of(
        name, small, mask, Config(mask), ONLY_MODE.get(name, "token-mean"), log_prob=log_prob
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_prob.grad).all()
