"""Counts what an engine copies to its GPU in an update of the weights: `python
scripts/null_gpu/update_copies.py`.

It runs vLLM with a 7B model on the null GPU without numbers, and loads the weights as each
transport brings them, with the fingerprints of what was sent taken before (each byte goes to the
GPU twice) and not. `make gpu-environment` makes what it needs. Prints a table.
"""

import ctypes
import json
import os
import sys
from dataclasses import replace
from typing import Any

from scripts.plan_check import ENGINES, make_models
from verl_like.rehearse.commands import config_of
from verl_like.rehearse.engine_process import RealSizeEngine, replace_what_needs_numbers, weights_of
from verl_like.rehearse.gpu_size import bytes_of_gpu
from verl_like.rehearse.null_gpu import NullGpu
from verl_like.single_controller.worker import rank_environment
from verl_like.workers.weights import arrival, fingerprints
from verl_like.workers.weights.arrival import check_staged
from verl_like.workers.weights.exports import WeightExport
from verl_like.workers.weights.shared_memory import SharedMemoryTransport, pin_pages

COUNTERS = ("copies", "copied_bytes", "blocking_copies")


def counted() -> dict[str, int]:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_count.restype = ctypes.c_long
    return {name: library.null_gpu_count(name.encode()) for name in COUNTERS}


def in_shared_memory(export: WeightExport) -> WeightExport:
    """The same weights in pages of the actor's memory, which the engine maps."""
    transport = SharedMemoryTransport()
    keep.append(transport)
    buckets = [
        replace(each, data=transport.allocate(each.data.nbytes, False)) for each in export.buckets
    ]
    return transport.publish(replace(export, buckets=tuple(buckets)))


keep: list[Any] = []
"""The transport whose memory is mapped, and the engine."""


def measure() -> list[tuple[str, dict[str, int]]]:
    config = config_of("main_ppo", ENGINES[0].overrides)
    policy = config.actor_rollout_ref
    os.environ |= rank_environment(0, 1, 0, 1, "cuda")
    replace_what_needs_numbers()
    # Fingerprints of garbage differ. vLLM's end of the weights is not imported yet.
    modules: tuple[Any, ...] = (arrival, fingerprints)
    for module in modules:
        module.read_fingerprints = lambda sums: dict.fromkeys(sums, 0)
    engine = RealSizeEngine(
        policy.rollout, policy.model, rank=0, world_size=1, seed=1, device="cuda"
    )
    keep.append(engine)
    unshared = weights_of(policy.model, policy.rollout.dtype)
    shared = in_shared_memory(unshared)
    rows = []
    for transport, export, checks, pins in (
        ("object_store", unshared, True, False),
        ("object_store", unshared, False, False),
        ("shared_memory", shared, True, False),
        ("shared_memory", shared, True, True),
    ):
        before = counted()
        if pins:
            pin_pages([export])
        if checks:
            check_staged([export], 1, "cuda")
        engine._load([export], 1)
        numbers = {name: number - before[name] for name, number in counted().items()}
        how = ["checked before"] if checks else ["checked when loaded"]
        rows.append((", ".join([transport, *how, *(["pinned"] if pins else [])]), numbers))
    return rows


def main() -> None:
    if "LD_PRELOAD" not in os.environ:
        make_models()
        rows = NullGpu().run("scripts.null_gpu.update_copies", {}, bytes_of_gpu("H100-80"))
        print("| an update of a 7B model | copies | GB | of them from memory that is not pinned |")
        print("|---|---|---|---|")
        for name, numbers in rows:
            gigabytes = numbers["copied_bytes"] / 1e9
            print(
                f"| {name} | {numbers['copies']} | {gigabytes:.1f} | {numbers['blocking_copies']} |"
            )
        return
    sys.stdout.write(json.dumps(measure()) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without the end of the engine


if __name__ == "__main__":
    main()
