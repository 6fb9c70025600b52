"""Tokens per second and MFU: from FLOPs, time and peak, merged over ranks."""

from types import SimpleNamespace

import pytest
import torch
from tiny_worker_models import local_group, make_batch, policy_config, write_model

from verl_like.protocol import DataProto, merge_metrics, metric_values
from verl_like.protocol.padded import padded
from verl_like.workers.actor import ActorWorker
from verl_like.workers.engine.throughput import Stopwatch, peak_flops
from verl_like.workers.models.packing import Rows


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("models") / "policy")
    return local_group(ActorWorker, policy_config(path, ppo_epochs=2))


def test_every_pass_reports_its_speed(actor):
    data = make_batch()
    infer = metric_values(actor.compute_log_prob(data).get().meta_info["metrics"])
    train = metric_values(actor.update_actor(data).get().meta_info["metrics"])
    assert 0 < infer["perf/mfu/actor_infer"] < 1 and 0 < train["perf/mfu/actor"] < 1
    assert infer["perf/tokens_per_s/actor_infer"] > 0
    # FLOPs are 3 passes of 2 epochs; tokens count once.
    cost = actor.workers[0].engine.cost
    columns = padded(data).batch
    lengths_B, num_scored_B = columns["attention_mask"].sum(-1), columns["response_mask"].sum(-1)
    flops_per_token = (
        6 * cost.forward(lengths_B, num_scored_B).sum().item() / lengths_B.sum().item()
    )
    ratio = train["perf/mfu/actor"] / train["perf/tokens_per_s/actor"]
    assert ratio == pytest.approx(flops_per_token / peak_flops("cpu", "float32"), rel=1e-6)


def test_rows_that_only_fill_a_rank_up_count_nothing(actor):
    engine, rows = actor.workers[0].engine, make_batch(rows=4)
    filled = DataProto.concat([rows, rows.select_idxs([0, 1])])
    filled.batch["is_pad"] = torch.arange(6) >= 4
    expected, got = (Stopwatch(engine, Rows.of(data), "ref", passes=1) for data in (rows, filled))
    assert got.tokens == expected.tokens == padded(rows).batch["attention_mask"].sum()
    assert got.flops == pytest.approx(expected.flops)


def test_the_groups_mfu_is_all_ranks_flops_by_all_ranks_time(actor, monkeypatch):
    # Passes of 2 and 4 seconds
    peak, times = peak_flops("cpu", "float32"), iter([10.0, 12.0, 20.0, 24.0])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("verl_like.workers.engine.throughput.time", clock)
    parts = []
    for tokens, flops in ((100, 0.6 * peak), (60, 0.3 * peak)):
        stopwatch = Stopwatch(actor.workers[0].engine, Rows.of(make_batch()), "ref", passes=1)
        stopwatch.tokens, stopwatch.flops = tokens, flops
        parts.append(stopwatch.metrics())
    merged = metric_values(merge_metrics(parts))
    assert merged["perf/mfu/ref"] == pytest.approx((0.6 + 0.3) / (2.0 + 4.0))
    assert merged["perf/tokens_per_s/ref"] == 100 / 2 + 60 / 4


def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    peak_flops.cache_clear()
    assert peak_flops("cuda", "bfloat16") == 989e12
    peak_flops.cache_clear()
