"""Metrics merge by the reduction that they carry."""

import math

import pytest
import torch

from verl_like.protocol import Metric, merge_metrics, metric_values


def test_each_reduction_merges_in_its_own_way():
    parts = [
        {
            "loss": Metric.mean(1.0, 10),
            "tokens": Metric.sum(10),
            "actor/maximizer": Metric.min(3),
            "longest": Metric.max(7),
        },
        {
            "loss": Metric.mean(4.0, 30),
            "tokens": Metric.sum(30),
            "actor/maximizer": Metric.min(5),
            "longest": Metric.max(2),
        },
    ]
    merged = metric_values(merge_metrics(parts))
    assert merged == {
        "loss": (10 + 120) / 40,
        "tokens": 40.0,
        "actor/maximizer": 3.0,
        "longest": 7.0,
    }


def test_the_mean_of_a_sum_counts_by_its_number_and_that_of_none_does_not_count():
    assert Metric.mean_of(6, 4) == Metric.mean(1.5, weight=4)
    assert Metric.mean_of(0, 0) == Metric.mean(0.0, weight=0)


def test_merging_in_groups_equals_merging_at_once():
    parts = [
        {"loss": Metric.mean(value, weight)} for value, weight in ((1.0, 1), (2.0, 2), (8.0, 5))
    ]
    at_once = merge_metrics(parts)["loss"]
    in_groups = merge_metrics([merge_metrics(parts[:2]), parts[2]])["loss"]
    assert at_once == in_groups == Metric.mean((1 + 4 + 40) / 8, 8)


def test_a_part_of_weight_zero_does_not_count_even_if_it_is_nan():
    empty = {"loss": Metric.mean(math.nan, 0)}
    assert merge_metrics([empty, {"loss": Metric.mean(2.0, 3)}])["loss"] == Metric.mean(2.0, 3)
    for parts in ([empty], [empty, {"loss": Metric.mean(5.0, 0)}]):
        merged = merge_metrics(parts)["loss"]
        assert math.isnan(merged.value) and merged.weight == 0


@pytest.mark.parametrize("reduction", [Metric.max, Metric.min, Metric.sum, Metric.mean])
def test_a_nan_stays_visible_wherever_it_stands(reduction):
    for values in ((math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(merge_metrics([{"x": reduction(value)} for value in values])["x"].value)


def test_a_metric_that_only_some_parts_have_is_kept():
    assert metric_values(merge_metrics([{"a": Metric.sum(1)}, {"b": Metric.max(2)}])) == {
        "a": 1.0,
        "b": 2.0,
    }
    assert merge_metrics([]) == {}


def test_wrong_metrics_are_refused_by_name():
    with pytest.raises(ValueError, match=r"metrics\['loss'\] is a float"):
        merge_metrics([{"loss": 1.0}])
    with pytest.raises(ValueError, match="metrics is a list"):
        merge_metrics([[Metric.sum(1)]])
    with pytest.raises(ValueError, match=r"'loss' is reduced as \['max', 'sum'\]"):
        merge_metrics([{"loss": Metric.sum(1)}, {"loss": Metric.max(1)}])
    with pytest.raises(ValueError, match="'median' is unknown"):
        Metric(1.0, "median")
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            Metric.mean(1.0, weight)


def test_values_become_plain_floats():
    metric = Metric.mean(torch.tensor(0.5), torch.tensor(2))
    assert (type(metric.value), type(metric.weight)) == (float, float)
