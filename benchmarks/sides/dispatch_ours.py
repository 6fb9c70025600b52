"""verl_like's side of `dispatch`, `calls` and `scaling`, and raw Ray actors in the same Ray."""

import copy
import gc
from typing import Any

import numpy as np
import torch

from benchmarks.serve import serve, stopwatch
from benchmarks.sides import dispatch_ray
from benchmarks.sides.dispatch_batch import COLUMNS, columns, ragged_lengths
from benchmarks.sides.dispatch_worker_ours import DispatchWorker
from verl_like.protocol import DataProto
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

state: dict[str, Any] = {}


def begin(num_cpus: int, store_mib: int = 1024) -> dict[str, Any]:
    torch.set_num_threads(1)
    dispatch_ray.init(num_cpus, store_mib)
    return {}


def start(workers: int) -> dict[str, Any]:
    """Seconds from the request for a group to its first answer; the group before it is stopped."""
    if "group" in state:
        state.pop("group").shutdown()
        state.pop("pool").release()
    with stopwatch() as seconds:
        state["pool"] = RayResourcePool([workers], use_gpu=False)
        state["group"] = RayWorkerGroup(state["pool"], RayClassWithInitArgs(DispatchWorker))
        state["group"].ping()
    return {"seconds": seconds[0]}


def start_raw(workers: int) -> dict[str, Any]:
    with stopwatch() as seconds:
        state["raw"] = dispatch_ray.raw_actors(workers)
    return {"seconds": seconds[0]}


def _tensors(rows: int, length: int, step: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(column) for name, column in columns(rows, length, step).items()}


def dispatch(rows: int, length: int, step: int) -> dict[str, Any]:
    """A new batch to the workers and one column of it back."""
    batch = DataProto.from_dict(_tensors(rows, length, step))
    with stopwatch() as seconds:
        result = state["group"].one_column_back(batch)
    returned = result.batch["returns"]
    assert torch.equal(returned, batch.batch["advantages"])
    return {"seconds": seconds[0], "sum": float(returned.double().sum())}


def dispatch_ragged(rows: int, longest: int) -> dict[str, Any]:
    """Bytes through the object store for a batch of jagged columns and one of them back."""
    lengths = ragged_lengths(rows, longest)
    flat = _tensors(1, int(lengths.sum()), 0)
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    batch = DataProto.from_dict(
        {
            name: torch.nested.nested_tensor_from_jagged(
                tensor[0], offsets if COLUMNS[name][1] == 1 else offsets // 2
            )
            for name, tensor in flat.items()
        }
    )
    before = dispatch_ray.created_bytes()
    with stopwatch() as seconds:
        result = state["group"].one_ragged_column_back(batch)
    assert torch.equal(result.batch["returns"].values(), flat["advantages"][0])
    return {"seconds": seconds[0], "bytes": dispatch_ray.created_bytes() - before}


def resident() -> dict[str, Any]:
    gc.collect()
    return {"bytes": dispatch_ray.private_bytes()}


def _first_ranks(group: RayWorkerGroup, workers: int) -> RayWorkerGroup:
    """A group of the first ranks alone, on the same processes."""
    processes = copy.copy(group.processes)
    processes.actors = processes.actors[:workers]
    part = RayWorkerGroup.__new__(RayWorkerGroup)
    part._attach(processes, {group.role: DispatchWorker}, group.role, group.deadline_s, None)
    return part


def small_calls(workers: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of calls to the first `workers` ranks: without arguments, and of 4 KiB there and
    back."""
    group = state["group"]
    if workers < group.world_size:
        if ("part", workers) not in state:
            state["part", workers] = _first_ranks(group, workers)
        group = state["part", workers]
    actors = state["raw"][:workers]
    payload = np.arange(1024, dtype=np.float32)
    batch = DataProto.from_dict({"advantages": torch.from_numpy(payload).view(32, 32)})
    assert torch.equal(group.echo(batch).batch["advantages"], batch.batch["advantages"])
    return {
        "ping": dispatch_ray.milliseconds(group.ping, repeats),
        "batch": dispatch_ray.milliseconds(lambda: group.echo(batch), repeats),
        "raw ping": dispatch_ray.milliseconds(lambda: dispatch_ray.raw_ping(actors), repeats),
        "raw batch": dispatch_ray.milliseconds(
            lambda: dispatch_ray.raw_echo(actors, payload), repeats
        ),
    }


if __name__ == "__main__":
    serve(begin, start, start_raw, dispatch, dispatch_ragged, resident, small_calls)
