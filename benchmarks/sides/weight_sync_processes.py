"""The trainer of `weight_sync` and, in a process of its own, the engine that gets the weights."""

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import sized
from benchmarks.serve import serve, stopwatch
from verl_like.single_controller.worker import Worker, reserve_port
from verl_like.workers.weights import WEIGHT_TRANSPORTS, exports
from verl_like.workers.weights.arrival import check_staged

ROWS = sized(1 << 18, 1 << 12)
COLUMNS = 1024
NUM_BYTES = 2 * ROWS * COLUMNS  # bfloat16
TIMEOUT_S = 120
state: dict[str, Any] = {}


def cut(flat: torch.Tensor, num_tensors: int) -> dict[str, torch.Tensor]:
    """The memory as (rows, COLUMNS) parameters of about the same size."""
    ends = np.linspace(0, ROWS, num_tensors + 1).astype(int)
    pieces = flat.view(ROWS, COLUMNS).split(np.diff(ends).tolist())
    return {f"layers.{index}.weight": piece for index, piece in enumerate(pieces)}


def engine(connection: Connection, port: int) -> None:
    """Receives as it is told; answers when it has the weights, and then with the sums of their
    bits."""
    join(1, port)
    worker = Worker()
    transports = {name: WEIGHT_TRANSPORTS[name]() for name in ("gloo", "shared_memory")}
    # In memory already, which is in the peer's favour
    flat = torch.ones(ROWS * COLUMNS, dtype=torch.bfloat16)
    while message := connection.recv():
        way, num_tensors, export, with_checks = message
        if export:
            received = transports[way].receive([export], worker)
            if with_checks:
                check_staged(received, export.version, "cpu")
            tensors = dict(exports.iterate_weights(received))
            memory = [np.asarray(bucket.data) for each in received for bucket in each.buckets]
        else:
            tensors = cut(flat, num_tensors)
            for tensor in [flat] if way == "one broadcast" else tensors.values():
                dist.broadcast(tensor, src=0)
            memory = [flat.view(torch.uint8).numpy()]
        # Every page is read once, so that memory that is mapped but not there yet costs what it
        # costs.
        connection.send(sum(int(each[::4096].sum()) for each in memory))
        sums = np.array(
            [tensor.reshape(-1).view(torch.int64).sum().item() for tensor in tensors.values()]
        )
        tensors, memory, received = {}, [], []  # what somebody reads is not written again
        flat.zero_()
        connection.send(sums)


def join(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def start() -> dict[str, Any]:
    holder, port = reserve_port()
    holder.close()
    connection, other = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(
        target=engine, args=(other, port), daemon=True
    ).start()
    join(0, port)
    state["connection"] = connection
    state["flat"] = torch.randn(
        ROWS * COLUMNS, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    state["transports"] = {name: WEIGHT_TRANSPORTS[name]() for name in ("gloo", "shared_memory")}
    state["version"] = 0
    return {}


def sync(way: str, num_tensors: int, value: int, with_checks: bool = False) -> dict[str, Any]:
    """Weights that hold `value` in places to the engine: seconds, and the sum of each parameter's
    bits there."""
    state["version"] += 1
    flat = state["flat"]
    connection = state["connection"]
    flat[::64] = value
    tensors = cut(flat, num_tensors)
    with stopwatch() as seconds:
        if way in state["transports"]:
            transport = state["transports"][way]
            without = mock.patch.object(exports, "local_fingerprint", lambda *_: 0)
            with contextlib.nullcontext() if with_checks else without:
                export = exports.collect_weights(
                    tensors.items(),
                    dtype=torch.bfloat16,
                    rank=0,
                    world_size=1,
                    version=state["version"],
                    allocate=transport.allocate,
                )
            connection.send((way, num_tensors, transport.publish(export), with_checks))
            # What the engine found is agreed on in the process group, which is the peer's too
            if with_checks:
                dist.all_reduce(torch.zeros(()))
        else:
            connection.send((way, num_tensors, None, False))
            for tensor in [flat] if way == "one broadcast" else tensors.values():
                dist.broadcast(tensor, src=0)
        assert connection.poll(TIMEOUT_S), (
            f"{way}: the engine does not have the weights after {TIMEOUT_S} s"
        )
        connection.recv()
    return {"seconds": seconds[0], "sums": connection.recv()}


if __name__ == "__main__":
    serve(start, sync)
