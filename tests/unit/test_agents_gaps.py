"""Rows with inserted tokens: each estimator, loss and correction equals that of the same row
without them."""

from functools import partial
from types import SimpleNamespace

import estimator_oracles
import numpy as np
import pytest
import torch
from estimator_oracles import random_batch
from test_algorithms_losses_oracles import MODES, ONLY_MODE, Config, batch, loss_of

from verl_like.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate_advantages,
    get_adv_estimator_fn,
)
from verl_like.algorithms.advantages.gdpo import GDPOOptions
from verl_like.algorithms.aggregation import agg_loss
from verl_like.algorithms.corrections import STATISTICS, RolloutCorrectionConfig
from verl_like.algorithms.corrections.correction import (
    compute_rollout_correction_and_rejection_mask,
)
from verl_like.algorithms.kl import apply_kl_penalty
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.value_loss import compute_value_loss

NUM_GAPS = 5
BY_POSITION = "optimal_token_baseline"
"""The estimator that compares tokens by their position, also behind inserted ones. Agents take the
one for tools."""


def places_of(shape: tuple[int, ...], seed: int = 8) -> np.ndarray:
    """(B, R): where each token of a row stands among R + NUM_GAPS ones."""
    rng = np.random.default_rng(seed)
    num_rows, length = shape
    chosen = [np.sort(rng.permutation(length + NUM_GAPS)[:length]) for _ in range(num_rows)]
    return np.stack(chosen)


def spread(column: np.ndarray, places: np.ndarray, fill: float) -> np.ndarray:
    """The tokens of a column at their places, and `fill` between them."""
    wide = np.full((len(column), column.shape[1] + NUM_GAPS), fill, dtype=column.dtype)
    np.put_along_axis(wide, places, column, axis=1)
    return wide


def gathered(wide: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    return wide.gather(1, torch.from_numpy(places))


@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS.names()) - {BY_POSITION}))
def test_an_estimator_does_not_see_inserted_tokens(name):
    rows = random_batch(7, least=0.0)
    full = np.ones_like(rows.mask)
    full[~rows.mask.any(-1)] = False
    rng = np.random.default_rng(2)
    columns = {
        "token_level_rewards": np.nan_to_num(rows.rewards),
        "values": rng.normal(size=full.shape).astype(np.float32),
        **estimator_oracles.Batch(rows.rewards, full, rows.index).columns(5),
        "rollout_log_probs": -rng.exponential(size=full.shape).astype(np.float32),
        "ref_log_prob": -rng.exponential(size=full.shape).astype(np.float32),
    }
    others = {
        "index": rows.index,
        "reward_baselines": torch.from_numpy(rng.normal(size=len(full)).astype(np.float32)),
        "gamma": 0.9,
        "config": SimpleNamespace(gamma=0.9),
        "lam": 0.8,
        "norm_adv_by_std_in_grpo": True,
        "options": GDPOOptions(gdpo_reward_keys=["rule"]) if name == "gdpo" else None,
    }
    places = places_of(full.shape)

    def estimated(change) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = {key: torch.from_numpy(change(column)) for key, column in columns.items()}
        mask = torch.from_numpy(change(full, fill=False)).long()
        scores = {"rule": tensors["token_level_rewards"]}
        inputs = others | tensors | {"response_mask": mask, "scores_by_reward": scores}
        return estimate_advantages(get_adv_estimator_fn(name), inputs)

    plain = estimated(lambda column, fill=0.0: column)
    wide = estimated(lambda column, fill=np.nan: spread(column, places, fill))
    for expected, found in zip(plain, wide, strict=True):
        assert expected.any()
        torch.testing.assert_close(gathered(found, places), expected, rtol=1e-5, atol=1e-6)
        assert found.abs().sum() == pytest.approx(gathered(found, places).abs().sum().item())


@pytest.mark.parametrize("name", sorted({*POLICY_LOSSES.names()}))
def test_a_loss_does_not_see_inserted_tokens(name):
    columns, mask, weights = batch()
    mask = mask.any(-1, keepdims=True) & np.ones_like(mask)
    places = places_of(mask.shape)
    wide_mask = spread(mask, places, False)
    wide = {key: spread(column, places, column.max()) for key, column in columns.items()}
    for mode in [ONLY_MODE[name]] if name in ONLY_MODE else MODES:
        log_prob = torch.from_numpy(columns["new"]).requires_grad_()
        loss, _ = loss_of(name, columns, mask, Config(mask), mode, weights, log_prob=log_prob)
        loss.backward()
        wide_log_prob = torch.from_numpy(wide["new"]).requires_grad_()
        wide_weights = spread(weights, places, 9.0)
        wide_loss, _ = loss_of(
            name, wide, wide_mask, Config(wide_mask), mode, wide_weights, log_prob=wide_log_prob
        )
        wide_loss.backward()
        assert wide_loss.item() == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(
            gathered(wide_log_prob.grad, places), log_prob.grad, rtol=1e-9, atol=1e-12
        )
        assert log_prob.grad.any()


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_does_not_see_inserted_tokens(statistic, level):
    rng = np.random.default_rng(1)
    shape = (6, 7)
    places = places_of(shape)
    rollout = -rng.exponential(size=shape)
    old = rollout + rng.normal(0, 0.25, shape) * np.arange(1, 7)[:, None]
    of_whole, _, kind = statistic.rpartition("_")
    squares = {"token": 0.3, "seq_sum": 2.5, "seq_mean": 0.35, "seq_max": 1.0}
    threshold = {"seq_mean": 1.1}.get(of_whole, 1.3) if kind == "k1" else squares[of_whole]
    config = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=1.5,
        rollout_rs=statistic,
        rollout_rs_threshold=threshold,
    )

    def corrected(change):
        columns = (change(old), change(rollout), change(np.ones(shape), 0.0))
        return compute_rollout_correction_and_rejection_mask(
            *(torch.from_numpy(column) for column in columns), config
        )

    weights, kept, values = corrected(lambda column, fill=0.0: column)
    wide_weights, wide_kept, wide_values = corrected(
        lambda column, fill=-33.0: spread(column, places, fill)
    )
    torch.testing.assert_close(gathered(wide_weights, places), weights)
    assert torch.equal(gathered(wide_kept, places), kept) and wide_kept.sum() == kept.sum()
    assert 0 < kept.sum() < kept.numel()
    assert wide_values == pytest.approx(values)


def test_the_value_loss_and_the_penalty_do_not_see_inserted_tokens():
    rng = np.random.default_rng(6)
    shape = (5, 6)
    places = places_of(shape)
    names = ("vpreds", "returns", "values")
    columns = {name: rng.normal(size=shape) for name in names}
    aggregate = partial(agg_loss, loss_agg_mode="seq-mean-token-mean")

    def loss(change) -> float:
        tensors = {name: torch.from_numpy(change(column)) for name, column in columns.items()}
        mask = torch.from_numpy(change(np.ones(shape), 0.0))
        value, _ = compute_value_loss(
            **tensors, response_mask=mask, cliprange_value=0.4, aggregate=aggregate
        )
        scores = tensors["returns"]
        rewards, kl = apply_kl_penalty(
            scores, tensors["vpreds"], tensors["values"], mask, kl_coef=0.3, estimator="kl"
        )
        return value.item(), kl, (rewards * mask).sum().item()

    plain = loss(lambda column, fill=0.0: column)
    wide = loss(lambda column, fill=7.0: spread(column, places, fill))
    assert wide == pytest.approx(plain, rel=1e-12)
