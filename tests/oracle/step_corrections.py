"""The corrections of rollout against trainer in float64, response by response. Imports nothing from
`verl_like`."""

import math
from typing import Any

import numpy as np
import torch

BLOCK = "algorithm.rollout_correction"
BYPASS = f"{BLOCK}.bypass_mode"
SWITCHES = (f"{BLOCK}.rollout_is", f"{BLOCK}.rollout_rs")


def correct(rows: list[Any], settings: dict[str, object]) -> dict[str, float]:
    """Adds weights to the rows, and takes tokens out of them that drifted too far; returns what is
    told of it."""
    metrics: dict[str, float] = {}
    log_ratios = [
        row.known["old_log_probs"] - row.rollout for row in rows if "old_log_probs" in row.known
    ]
    if settings[f"{BLOCK}.rollout_is"]:
        weights, metrics = importance_weights(log_ratios, settings)
        for row, of_row in zip(rows, weights, strict=True):
            row.known["weights"] = of_row
    if settings[f"{BLOCK}.rollout_rs"]:
        kept, of_rejection = kept_tokens(log_ratios, settings)
        metrics |= of_rejection
        for row, stays in zip(rows, kept, strict=True):
            row.positions = [t for t, stay in zip(row.positions, stays, strict=True) if stay]
            row.known = {
                name: column[torch.from_numpy(stays)] for name, column in row.known.items()
            }
            row.score = row.score if row.positions else None
    return metrics


def of_update(log_ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer step tells of each token, from the policy's log-probability minus the
    rollout's."""
    return {
        "actor/rollout_kl": -log_ratio,
        "actor/rollout_ratio": log_ratio.exp(),
        "actor/rollout_ratio_square": (2 * log_ratio).exp(),
    }


def effective_sample_size(ratios: list[list[torch.Tensor]]) -> dict[str, float]:
    """Kish's effective sample size of the weights of all tokens of all optimizer steps, as a share
    of them."""
    weights = [float(weight) for of_step in ratios for of_row in of_step for weight in of_row]
    if not weights:
        return {}
    return {
        "actor/eff_sample_size": sum(weights) ** 2
        / sum(weight**2 for weight in weights)
        / len(weights)
    }


def drift_metrics(rows: list[Any]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the rollout's."""
    log_ratios = [row.known["old_log_probs"] - row.rollout for row in rows]
    d = torch.cat(log_ratios).numpy()
    row_means = np.array([float(row.mean()) for row in log_ratios])
    perplexities = np.exp([-float(row.known["old_log_probs"].mean()) for row in rows])
    metrics = {
        "kl": -d.mean(),
        "k3_kl": np.mean(np.exp(d) - d - 1),
        "training_ppl": perplexities.mean(),
        "rollout_ppl": np.mean(perplexities * np.exp(row_means)),
        "log_ppl_diff": -row_means.mean(),
        "log_ppl_abs_diff": np.abs(row_means).mean(),
        "ppl_ratio": np.exp(-row_means).mean(),
        "chi2_token": np.mean(np.exp(2 * d)) - 1,
        "chi2_seq": np.mean([math.exp(2 * float(row.sum())) for row in log_ratios]) - 1,
        "drift_p50": np.quantile(np.abs(d), 0.5),
        "drift_p99": np.quantile(np.abs(d), 0.99),
        "drift_max": np.abs(d).max(),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def importance_weights(
    log_ratios: list[torch.Tensor], settings: dict[str, object]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The weights of each response's tokens, and what is told of them."""
    threshold, level = settings[f"{BLOCK}.rollout_is_threshold"], settings[f"{BLOCK}.rollout_is"]
    raw = [
        row.exp() if level == "token" else row.sum().exp() * torch.ones_like(row)
        for row in log_ratios
    ]
    units = torch.cat(raw) if level == "token" else torch.stack([row[0] for row in raw])
    metrics = {"rollout_is_max": units.max(), "rollout_is_min": units.min()}
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        weights = [torch.where((row >= low) & (row <= high), row, 0.0) for row in raw]
        metrics["rollout_is_oob_ratio"] = (torch.cat(weights) == 0).double().mean()
    else:
        low, high = 1 / threshold, threshold
        weights = [row.clamp(max=high) for row in raw]
    applied = torch.cat(weights)
    metrics |= {"rollout_is_mean": applied.mean(), "rollout_is_std": applied.std(correction=0)}
    metrics["rollout_is_eff_sample_size"] = applied.mean() ** 2 / (applied**2).mean()
    metrics["rollout_is_ratio_fraction_high"] = (units > high).double().mean()
    metrics["rollout_is_ratio_fraction_low"] = (units < low).double().mean()
    if settings[f"{BLOCK}.rollout_is_batch_normalize"]:
        of_units = applied if level == "token" else torch.stack([row[0] for row in weights])
        metrics["rollout_is_batch_norm_factor"] = of_units.mean()
        weights = [row / of_units.mean() for row in weights]
    return weights, {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def kept_tokens(
    log_ratios: list[torch.Tensor], settings: dict[str, object]
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Which tokens of each response stay, and what is told of it; bounds are given one for each
    statistic."""
    names = settings[f"{BLOCK}.rollout_rs"].split(",")
    kept, metrics = [np.ones(len(row), dtype=bool) for row in log_ratios], {}

    def removed(stays: list[np.ndarray], prefix: str) -> None:
        metrics[f"{prefix}_masked_fraction"] = float(np.mean(~np.concatenate(stays)))
        metrics[f"{prefix}_seq_masked_fraction"] = float(np.mean([not row.all() for row in stays]))

    for name, bounds in zip(
        names, settings[f"{BLOCK}.rollout_rs_threshold"].split(","), strict=True
    ):
        level, _, kind = name.rpartition("_")
        of_token = {
            "k1": lambda d: -d,
            "k2": lambda d: d * d / 2,
            "k3": lambda d: np.exp(d) - d - 1,
        }[kind]
        reduce = {"token": lambda v: v, "seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}[
            level
        ]
        values = [np.broadcast_to(reduce(of_token(row.numpy())), len(row)) for row in log_ratios]
        low, high = (
            [math.log(float(b)) for b in bounds.split("_")]
            if kind == "k1"
            else [-math.inf, float(bounds)]
        )
        stays = [(row >= low) & (row <= high) for row in values]
        kept = [one & other for one, other in zip(kept, stays, strict=True)]
        prefix, everything = f"rollout_corr/rollout_rs_{name}", np.concatenate(values)
        for statistic in ("mean", "max", "min"):
            metrics[f"{prefix}_{statistic}"] = float(getattr(everything, statistic)())
        removed(stays, prefix)
    removed(kept, "rollout_corr/rollout_rs")
    return kept, metrics
