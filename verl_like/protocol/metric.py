"""Metrics: numbers that say how they are reduced over ranks and micro-batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """One number and its reduction.

    `weight` counts for "mean" only: it is the amount of tokens, rows and so on over which the mean
    was taken.

    Raises ValueError for an unknown reduction or a negative or non-finite weight.
    """

    value: float
    reduction: Reduction
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ValueError(
                f"Metric reduction {self.reduction!r} is unknown; use one of {get_args(Reduction)}."
            )
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"Metric weight must be finite and not negative, got {self.weight}.")

    @staticmethod
    def mean(value: float, weight: float = 1.0) -> "Metric":
        return Metric(float(value), "mean", float(weight))

    @staticmethod
    def mean_of(total: float, number: float) -> "Metric":
        """Makes the mean of `number` values whose sum is `total`. Of none it is 0 with weight 0, so
        it does not count."""
        return Metric.mean(total / max(number, 1), weight=number)

    @staticmethod
    def sum(value: float) -> "Metric":
        return Metric(float(value), "sum")

    @staticmethod
    def max(value: float) -> "Metric":
        return Metric(float(value), "max")

    @staticmethod
    def min(value: float) -> "Metric":
        return Metric(float(value), "min")


def merge_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the metrics of several ranks or micro-batches key by key. A key may be missing in some
    parts.

    Means are weighted by `weight` (a part of weight 0 does not count; if all weights are 0 the
    value is nan), sums are added, and a nan among maxima or minima stays visible. Merging is
    associative up to float rounding. Raises ValueError if a value is not a Metric or if one key has
    two reductions.
    """
    by_name: dict[str, list[Metric]] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise ValueError(
                f"metrics is a {type(part).__name__}; it must be a dict of Metric by name."
            )
        for name, metric in part.items():
            if not isinstance(metric, Metric):
                raise ValueError(
                    f"metrics[{name!r}] is a {type(metric).__name__}, not a Metric; "
                    "say how it is reduced: Metric.mean(value, weight), Metric.sum(value), .max or "
                    ".min."
                )
            by_name.setdefault(name, []).append(metric)
    return {name: _merge_one(name, metrics) for name, metrics in by_name.items()}


def _merge_one(name: str, metrics: list[Metric]) -> Metric:
    reductions = {metric.reduction for metric in metrics}
    if len(reductions) > 1:
        raise ValueError(
            f"Metric {name!r} is reduced as {sorted(reductions)}; every part must use the same "
            "reduction."
        )
    if len(metrics) == 1 and metrics[0].weight > 0:
        return metrics[0]
    reduction = metrics[0].reduction
    values = [metric.value for metric in metrics]
    if reduction == "mean":
        counted = [metric for metric in metrics if metric.weight > 0]
        if not counted:
            return Metric.mean(math.nan, 0.0)
        weight = sum(metric.weight for metric in counted)
        total = sum(metric.value * metric.weight for metric in counted)
        return Metric.mean(total / weight, weight)
    if reduction == "sum":
        return Metric.sum(sum(values))
    # Max() and min() would keep or lose a nan by its position
    if any(map(math.isnan, values)):
        return Metric(math.nan, reduction)
    extreme = max(values) if reduction == "max" else min(values)
    return Metric(extreme, reduction)


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns the plain numbers, as a tracker logs them."""
    return {name: metric.value for name, metric in metrics.items()}
