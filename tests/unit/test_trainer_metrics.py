"""Step and validation metrics against numbers derived by hand."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto, merge_metrics, metric_values
from verl_like.protocol.padded import without_padding
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.trainer.ppo.learner import Learner
from verl_like.trainer.ppo.metrics import batch_metrics, validation_metrics


def small_batch() -> DataProto:
    """Two prompts of 1 and 2 tokens (P = 2), responses of 2 tokens (R = 2), the last of which a
    tool wrote."""
    in_verls_layout = DataProto.from_dict(
        tensors={
            "input_ids": torch.ones(2, 4, dtype=torch.int64),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
            "responses": torch.ones(2, 2, dtype=torch.int64),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [0.5, 9.0 * 0]]),
            "token_level_rewards": torch.tensor([[-0.1, 0.9], [0.5, 0.0]]),
            "advantages": torch.tensor([[1.0, 2.0], [-3.0, 77.0]]),
            "returns": torch.tensor([[1.0, 3.0], [2.0, 77.0]]),
            "values": torch.tensor([[1.0, 3.0], [0.5, -77.0]]),
            "rollout_log_probs": torch.log(torch.tensor([[0.5, 0.25], [0.8, 1.0]])),
            "old_log_probs": torch.log(torch.tensor([[0.5, 0.35], [0.6, 0.1]])),
        }
    )
    return without_padding(in_verls_layout, pad_token_id=0)


def with_mask(*rows: list[int]) -> DataProto:
    """The small batch with this `response_mask`."""
    batch = small_batch()
    batch.batch["response_mask"] = jagged_from_lists(rows, torch.int64)
    return batch


def test_batch_metrics_count_response_tokens_only():
    metrics = metric_values(
        batch_metrics(small_batch(), max_prompt_length=2, max_response_length=2)
    )
    assert metrics["critic/score/mean"] == pytest.approx(0.75)
    assert metrics["critic/rewards/mean"] == pytest.approx((0.8 + 0.5) / 2)
    assert metrics["critic/advantages/mean"] == pytest.approx(0.0)
    assert metrics["critic/advantages/max"] == 2.0 and metrics["critic/advantages/min"] == -3.0
    assert metrics["response_length/mean"] == 1.5 and metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/max"] == 2 and metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["perf/total_num_tokens"] == 7


def test_explained_variance_compares_the_residual_with_the_returns():
    metrics = metric_values(batch_metrics(small_batch(), 2, 2))
    returns, residual = np.array([1.0, 3.0, 2.0]), np.array([0.0, 0.0, 1.5])
    assert metrics["critic/vf_explained_var"] == pytest.approx(
        1 - residual.var() / returns.var(), abs=1e-4
    )


def test_drift_is_the_difference_of_probabilities_not_of_log_probabilities():
    metrics = metric_values(batch_metrics(small_batch(), 2, 2))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(
        (0 + 0.1 + 0.2) / 3, abs=1e-6
    )
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2, abs=1e-6)
    expected = np.corrcoef([0.5, 0.25, 0.8], [0.5, 0.35, 0.6])[0, 1]
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, abs=1e-5)


def test_the_effect_of_router_replay_is_measured_on_rows_that_were_computed_without_it_too():
    batch = small_batch()
    assert not any("router_replay" in name for name in batch_metrics(batch, 2, 2))
    without = jagged_from_lists([[np.log(0.25), np.log(0.125)], [np.nan, np.nan]], torch.float32)
    batch.batch["unreplayed_log_probs"] = without
    metrics = metric_values(batch_metrics(batch, 2, 2))
    with_replay = abs(np.log(0.35 / 0.25)) / 2  # of the first token there is no difference
    assert metrics["router_replay/log_probs_diff_with"] == pytest.approx(with_replay, abs=1e-6)
    assert metrics["router_replay/log_probs_diff_without"] == pytest.approx(np.log(2), abs=1e-6)


def test_drift_needs_two_tokens_for_a_spread():
    metrics = metric_values(batch_metrics(with_mask([1, 0], [1, 0]), 2, 2))
    # Of 0 and 0.2
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.2 / 2**0.5, abs=1e-6)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    assert not any("rollout_" in name for name in batch_metrics(with_mask([1, 0], [0, 0]), 2, 2))


def test_a_batch_in_which_every_sample_was_skipped_has_no_token_metrics():
    batch = with_mask([0, 0], [0, 0])
    metrics = metric_values(batch_metrics(batch, 2, 2))
    assert "critic/advantages/mean" not in metrics and "response_length/mean" not in metrics
    assert metrics["perf/total_num_tokens"] == 7  # they were generated all the same
    merged = metric_values(
        merge_metrics([batch_metrics(batch, 2, 2), batch_metrics(small_batch(), 2, 2)])
    )
    assert merged["response_length/clip_ratio"] == 0.5  # of the two responses that count


def test_a_skipped_sample_counts_neither_as_a_short_response_nor_as_a_score_of_zero():
    metrics = metric_values(batch_metrics(with_mask([1, 1], [0, 0]), 2, 2))
    assert metrics["response_length/mean"] == 2 and metrics["critic/score/mean"] == 1.0


def test_samples_of_several_rows_count_as_one():
    # Two rows, of 2 and 1 tokens after a prompt of 1 and, with the first response, 3; and a row of
    # 2 tokens after 2.
    scores, advantages = [[0.0, 0.25], [0.75], [0.0, 0.5]], [[1.0, 1.0], [1.0], [-3.0, -3.0]]
    of_tokens = {
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": advantages,
    }
    of_tokens |= {"returns": advantages, "rollout_log_probs": scores, "old_log_probs": scores}
    tensors = {name: jagged_from_lists(rows, torch.float32) for name, rows in of_tokens.items()}
    tensors |= dict.fromkeys(
        ("responses", "response_mask"), jagged_from_lists([[1, 1], [1], [1, 1]], torch.int64)
    )
    tensors["prompts"] = jagged_from_lists([[1], [1, 1, 1], [1, 1]], torch.int64)
    tensors["sample_id"] = torch.tensor([7, 7, 4])
    batch = DataProto.from_dict(tensors, meta_info={"padding": (3, 4, 0)})
    metrics = metric_values(batch_metrics(batch, max_prompt_length=3, max_response_length=4))
    assert [metrics[f"critic/score/{name}"] for name in ("mean", "max", "min")] == [0.75, 1.0, 0.5]
    assert metrics["critic/rewards/mean"] == 0.75
    assert metrics["critic/advantages/mean"] == pytest.approx((3 * 1 - 2 * 3) / 5)
    assert [metrics[f"response_length/{name}"] for name in ("mean", "max", "min")] == [2.5, 3, 2]
    assert [metrics[f"prompt_length/{name}"] for name in ("mean", "max", "min")] == [1.5, 2, 1]
    assert metrics["perf/total_num_tokens"] == 1 + 3 + 2 + 5
    # The first was skipped
    batch.batch["response_mask"] = jagged_from_lists([[0, 0], [0], [1, 1]], torch.int64)
    metrics = metric_values(batch_metrics(batch, max_prompt_length=3, max_response_length=4))
    assert (
        metrics["critic/score/mean"],
        metrics["response_length/mean"],
        metrics["prompt_length/mean"],
    ) == (0.5, 2, 2)


def test_a_sample_of_several_rows_is_as_old_as_its_oldest_token_and_counts_once():
    config = SimpleNamespace(trainer=SimpleNamespace(max_staleness=2))
    learner: Any = SimpleNamespace(version=5, config=config)
    spans = [((5, 0, 2),), ((3, 0, 1), (5, 1, 2)), ((4, 0, 2),), ((5, 0, 2),), ()]
    batch = DataProto.from_dict(
        {"sample_id": torch.tensor([0, 0, 0, 1, 2])}, {"policy_version": spans}
    )
    metrics = Learner.staleness(learner, batch)
    assert metric_values(metrics) == {
        "training/staleness/mean": 1.0,
        "training/staleness/max": 2,
        "training/staleness/share_0": 0.5,
        "training/staleness/share_1": 0.0,
        "training/staleness/share_2": 0.5,
        "training/staleness/mixed": 0.5,
    }
    assert {metric.weight for name, metric in metrics.items() if "max" not in name} == {2}


Sample = tuple[str, str, dict[str, float]]
"""Data source, prompt, and the values of a response."""


def samples(source: str, prompt_id: str, *values: dict[str, float]) -> list[Sample]:
    return [(source, prompt_id, v) for v in values]


def validated(samples: list[Sample]) -> dict[str, float]:
    """The metrics of a validation batch whose rewards, and numbers beside them, are these."""
    extra = dict.fromkeys(name for _, _, values in samples for name in values if name != "reward")
    objects = {
        "data_source": [source for source, _, _ in samples],
        "uid": [prompt_id for _, prompt_id, _ in samples],
    }
    objects["reward_extra/said"] = ["yes"] * len(samples)
    non_tensors = {name: np.array(values, dtype=object) for name, values in objects.items()}
    for name in extra:
        non_tensors[f"reward_extra/{name}"] = np.array(
            [values.get(name, np.nan) for _, _, values in samples]
        )
    rewards_B = torch.tensor(
        [values.get("reward", 0.0) for _, _, values in samples], dtype=torch.float64
    )
    batch = DataProto.from_dict(
        tensors={"responses": torch.zeros(len(samples), 2)}, non_tensors=non_tensors
    )
    num_samples = max(Counter((source, uid) for source, uid, _ in samples).values())
    return validation_metrics(batch, rewards_B, num_samples)


def test_the_names_of_a_validation_do_not_depend_on_how_many_episodes_failed():
    metrics = validated(
        [
            *samples("a", "0", {"reward": 1.0}, {"reward": 0.0}),
            *samples("b", "1", {"reward": 1.0}),  # of two
        ]
    )
    assert metrics["val-core/b/reward/mean@2"] == metrics["val-core/b/reward/best@2/mean"] == 1.0


def test_validation_takes_the_mean_over_prompts_of_the_mean_over_samples():
    metrics = validated(
        [
            *samples("a", "0", {"reward": 1.0}, {"reward": 0.0}),
            *samples("a", "1", {"reward": 0.0}, {"reward": 0.0}),
            *samples("b", "2", {"reward": 1.0}, {"reward": 1.0}),
        ]
    )
    assert metrics == {
        "val-core/a/reward/mean@2": 0.25,
        "val-core/a/reward/best@2/mean": 0.5,
        "val-core/b/reward/mean@2": 1.0,
        "val-core/b/reward/best@2/mean": 1.0,
    }


def test_the_core_variable_of_a_data_source_is_acc_where_its_reward_function_reports_it():
    metrics = validated(
        [*samples("a", "0", {"reward": 0.3, "acc": 1.0}), *samples("b", "1", {"reward": 0.5})]
    )
    assert metrics == {
        "val-aux/a/reward/mean@1": 0.3,
        "val-core/a/acc/mean@1": 1.0,
        "val-core/b/reward/mean@1": 0.5,
    }


@pytest.mark.parametrize("core", ["reward", "acc"])
def test_validation_counts_what_was_not_scored_as_0(core: str):
    """Twelve prompts: three answers right, five wrong, four not scored."""
    values = [{"reward": 1.0, "acc": 1.0, "length": 6.0}] * 3 + [
        {"reward": 0.0, "acc": 0.0, "length": 2.0}
    ] * 5
    values = [{name: v[name] for name in ("reward", core, "length")} for v in values] + [
        {"reward": 0.0}
    ] * 4
    metrics = validated([("a", str(i), v) for i, v in enumerate(values)])
    assert metrics[f"val-core/a/{core}/mean@1"] == 0.25
    # Of the responses that have one
    assert metrics["val-aux/a/length/mean@1"] == (3 * 6 + 5 * 2) / 8


def test_validation_counts_an_unscored_sample_of_a_prompt_as_0():
    """Two prompts of three samples: of the first one is right and one not scored, of the second
    none is scored."""
    metrics = validated(
        [
            *samples("a", "0", {"acc": 1.0}, {"reward": 0.0}, {"acc": 0.0}),
            *samples("a", "1", *[{"reward": 0.0}] * 3),
        ]
    )
    assert metrics["val-core/a/acc/mean@3"] == pytest.approx(1 / 6)
    assert metrics["val-core/a/acc/best@3/mean"] == 0.5
