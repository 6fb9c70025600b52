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
    """The batch with the experts of its tokens, (rows, tokens, layers, experts of a token)."""
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
    column = worker.compute_log_prob(batch).tensors()[ROUTED_EXPERTS]
    report_cost_of_replay(report, device, worker, batch, column)
    report_other_routing(report, worker, batch, column)


def report_cost_of_replay(
    report: Any, device: str, worker: RandomPolicy, batch: DataProto, column: torch.Tensor
) -> None:
    """The rates of updates and log-probabilities without replay, and with that of `column`."""
    num_tokens = len(jagged_parts(column)[0])
    shape = worker.routers
    rates = {}
    norms = {}
    for mode, own in (("disabled", batch), ("R2", with_routing(batch, column))):
        worker.replay_mode = mode
        worker.routers = shape if mode == "R2" else None  # an update demands routing for them
        passes = {
            "update": lambda own=own: update(worker, own),
            "log-probabilities": lambda: log_probs(worker, batch),
        }
        for what, run in passes.items():
            seconds = seconds_of(device, run, rounds=2 * ROUNDS, warm_up=2)
            rates[mode, what] = [num_tokens / s for s in seconds]
        norms[mode] = update(worker, own)["actor/grad_norm"]
    for what in ("update", "log-probabilities"):
        plain = rates["disabled", what]
        replayed = rates["R2", what]
        by_plain = statistics.median(replayed) / statistics.median(plain)
        report.row(f"experts, without replay: {what}", "tokens/s", plain)
        report.row(f"experts, replay: {what}", "tokens/s", replayed, by_plain=by_plain)
    tolerance = 1e-2 if device == "cuda" else 1e-5
    assert abs(norms["R2"] / norms["disabled"] - 1) < tolerance, f"gradient norms: {norms}"


def report_other_routing(
    report: Any, worker: RandomPolicy, batch: DataProto, column: torch.Tensor
) -> None:
    """How far log-probabilities are from those without replay, if the model's own routing is
    replayed and if that of the next layer is."""
    ids, offsets = jagged_parts(column)
    num_bytes = ids.element_size() * ids[0].numel()
    report.row("experts, replay: routing of a token", "bytes", [num_bytes])
    worker.replay_mode = "disabled"
    unreplayed = log_probs(worker, batch)
    worker.replay_mode = "R3"  # which replays where log-probabilities are computed, too
    distances = {}
    for name, routing in (("own", ids), ("another layer's", ids.roll(1, 1))):
        replayed = with_routing(batch, jagged_from_offsets(routing, offsets))
        distance = (log_probs(worker, replayed) - unreplayed).abs().mean().item()
        report.row(f"experts, replay of {name} routing moves log-probabilities by", "", [distance])
        distances[name] = distance
    assert distances["own"] < 0.05 * distances["another layer's"], distances


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
