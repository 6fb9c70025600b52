"""Cases of the GPU check for mixtures of experts: updates, router replay, memory, export."""

import statistics
from typing import Any

import torch

from benchmarks.sides.gpu_kernels import report_peak, start_peak
from benchmarks.sides.gpu_process import seconds_of
from benchmarks.sides.gpu_training import (
    EXPERTS,
    ROUNDS,
    RandomPolicy,
    log_probs,
    policy,
    report_speed,
    rows,
    update,
)
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_offsets, jagged_parts
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS


def tokens_on(device: str) -> int:
    """The tokens of a micro-batch."""
    return 16_384 if device == "cuda" else 128


def batch_of(worker: RandomPolicy, device: str) -> DataProto:
    """Two micro-batches of sequences of 4,096 tokens; on a CPU of 32."""
    tokens = tokens_on(device)
    return rows(worker, [tokens // 4] * 8)


def with_routing(batch: DataProto, column: torch.Tensor) -> DataProto:
    columns = batch.select()
    columns.batch[ROUTED_EXPERTS] = column
    return columns


def experts(report: Any, device: str, *, way: str, compiled: bool = False) -> None:
    """Updates and log-probabilities, the experts computed in one way; all give the same numbers."""
    what = f"experts, {way}{', compiled' * compiled}"
    if compiled and device != "cuda":
        report.skip(what, "cuda only")
        return
    before = start_peak(device)
    worker = policy(
        EXPERTS,
        device,
        tokens_on(device),
        model={"override_config": {"experts_implementation": way}, "use_torch_compile": compiled},
    )
    batch = batch_of(worker, device)
    first = update(worker, batch)
    for metric in ("actor/grad_norm", "actor/entropy"):
        report.same(
            f"{metric} of the first update", what, first[metric], 2e-2 if device == "cuda" else 1e-5
        )
    report_speed(report, what, worker, batch)
    report_peak(report, f"{what}: peak memory", device, before)
    num_tokens = 8 * (tokens_on(device) // 4)
    seconds = seconds_of(device, lambda: log_probs(worker, batch), rounds=ROUNDS, warm_up=1)
    report.row(f"{what}: log-probabilities", "tokens/s", [num_tokens / s for s in seconds])


def replay(report: Any, device: str) -> None:
    """What recording the routing and replaying it take; the model's own routing changes nothing,
    and another one does."""
    # The learning rate is 0, so all passes meet the same weights.
    worker = policy(EXPERTS, device, tokens_on(device), lr=0.0, replay_mode="R2")
    batch = batch_of(worker, device)
    num_tokens = 8 * (tokens_on(device) // 4)
    column = worker.compute_log_prob(batch).tensors()[ROUTED_EXPERTS]
    replayed = with_routing(batch, column)
    rates: dict[str, list[float]] = {}
    norms = {}
    values = {}
    shape = worker.routers
    for mode in ("disabled", "R2"):
        worker.replay_mode = mode
        worker.routers = None if mode == "disabled" else shape  # which an update then demands
        own = batch if mode == "disabled" else replayed
        for what, run in (
            ("update", lambda own=own: update(worker, own)),
            ("log-probabilities", lambda: log_probs(worker, batch)),
        ):
            seconds = seconds_of(device, run, rounds=2 * ROUNDS, warm_up=2)
            rates[f"{mode}, {what}"] = [num_tokens / s for s in seconds]
        norms[mode] = update(worker, own)["actor/grad_norm"]
    for what in ("update", "log-probabilities"):
        plain = rates[f"disabled, {what}"]
        with_replay = rates[f"R2, {what}"]
        by_plain = statistics.median(with_replay) / statistics.median(plain)
        report.row(f"experts, without replay: {what}", "tokens/s", plain)
        report.row(f"experts, replay: {what}", "tokens/s", with_replay, by_plain=by_plain)
    ids, offsets = jagged_parts(column)
    num_bytes = ids.element_size() * ids[0].numel()
    report.row("experts, replay: routing of a token", "bytes", [num_bytes])
    tolerance = 1e-2 if device == "cuda" else 1e-5
    assert abs(norms["R2"] / norms["disabled"] - 1) < tolerance, f"gradient norms: {norms}"
    # R3 reads the routing where log-probabilities are computed, too.
    worker.replay_mode = "R3"
    other_layer = jagged_from_offsets(ids.roll(1, 1), offsets)
    for name, routing in (("own", column), ("another layer's", other_layer)):
        values[name] = log_probs(worker, with_routing(batch, routing))
    worker.replay_mode = "disabled"
    unreplayed = log_probs(worker, batch)
    off = (values["own"] - unreplayed).abs().mean().item()
    far = (values["another layer's"] - unreplayed).abs().mean().item()
    report.row("experts, replay of another layer's routing moves log-probabilities by", "", [far])
    report.row("experts, replay of the model's own routing moves them by", "", [off])
    assert off < 0.05 * far, f"own routing moves log-probabilities by {off}, another one by {far}"


def memory(report: Any, device: str, *, dtype: str) -> None:
    """What the allocator reserves in each phase, for the plan of memory and the rehearsal."""
    if device != "cuda":
        report.skip(f"experts, {dtype}, reserved", "cuda only")
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    worker = policy(EXPERTS, device, tokens_on(device), fsdp={"dtype": dtype})
    batch = batch_of(worker, device)
    for phase, run in (
        ("at rest", lambda: None),
        ("log-probabilities", lambda: log_probs(worker, batch)),
        ("first update", lambda: update(worker, batch)),
        ("second update", lambda: update(worker, batch)),
        ("export", lambda: worker.export_weights(version=1)),
    ):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        for kind, peak in (
            ("tensors", torch.cuda.max_memory_allocated()),
            ("reserved", torch.cuda.max_memory_reserved()),
        ):
            report.row(f"experts, {dtype}, {phase}: {kind}", "GB", [1e-9 * peak])
