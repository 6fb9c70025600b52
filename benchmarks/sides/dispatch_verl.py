"""verl's side of `dispatch` and `calls`; the environment says how DataProto serialises."""

import gc
from typing import Any

import numpy as np
import ray
import torch
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.serve import serve, stopwatch
from benchmarks.sides import dispatch_ray
from benchmarks.sides.dispatch_batch import columns, ragged_lengths
from benchmarks.sides.dispatch_worker_verl import DispatchWorker

state: dict[str, Any] = {}


def begin(num_cpus: int, store_mib: int = 1024) -> dict[str, Any]:
    torch.set_num_threads(1)
    dispatch_ray.init(num_cpus, store_mib)
    return {}


def start(workers: int) -> dict[str, Any]:
    """Seconds from the request for a group to its first answer; the group before it is stopped."""
    if "group" in state:
        for worker in state.pop("group").workers:
            ray.kill(worker)
        for group in state.pop("pool").pgs:
            ray.util.remove_placement_group(group)
    with stopwatch() as seconds:
        state["pool"] = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
        with_arguments = RayClassWithInitArgs(ray.remote(DispatchWorker))
        state["group"] = RayWorkerGroup(state["pool"], with_arguments, device_name="cpu")
        state["group"].ping()
    return {"seconds": seconds[0]}


def _batch(arrays: dict[str, np.ndarray]) -> DataProto:
    return DataProto.from_dict({name: torch.from_numpy(column) for name, column in arrays.items()})


def dispatch(rows: int, length: int, step: int) -> dict[str, Any]:
    """A new batch to the workers and one column of it back."""
    batch = _batch(columns(rows, length, step))
    with stopwatch() as seconds:
        result = state["group"].one_column_back(batch)
    returned = result.batch["returns"]
    assert torch.equal(returned, batch.batch["advantages"])
    return {"seconds": seconds[0], "sum": float(returned.double().sum())}


def dispatch_ragged(rows: int, longest: int) -> dict[str, Any]:
    """Bytes through the object store for the padded batch, as verl's trainer holds it, and one
    column of it back."""
    assert int(ragged_lengths(rows, longest).max()) == longest
    batch = _batch(columns(rows, longest, 0))
    before = dispatch_ray.created_bytes()
    with stopwatch() as seconds:
        state["group"].one_column_back(batch)
    return {"seconds": seconds[0], "bytes": dispatch_ray.created_bytes() - before}


def resident() -> dict[str, Any]:
    gc.collect()
    return {"bytes": dispatch_ray.private_bytes()}


def small_calls(workers: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of calls: without arguments, and of 4 KiB there and back."""
    group = state["group"]
    assert group.world_size == workers
    batch = _batch({"advantages": np.arange(1024, dtype=np.float32).reshape(32, 32)})
    assert torch.equal(group.echo(batch).batch["advantages"], batch.batch["advantages"])
    return {
        "ping": dispatch_ray.milliseconds(group.ping, repeats),
        "batch": dispatch_ray.milliseconds(lambda: group.echo(batch), repeats),
    }


serve(begin, start, dispatch, dispatch_ragged, resident, small_calls)
