"""verl_like's side of `overlap`: both updates are submitted, then both are collected, as
`RayPPOTrainer.step` does."""

from typing import Any

import ray
import torch

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.overlap_work import columns
from benchmarks.sides.overlap_worker_ours import Role
from verl_like.protocol import DataProto
from verl_like.single_controller import Ordered
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

groups: dict[str, Any] = {}


def start() -> dict[str, Any]:
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for seed, role in enumerate(("actor", "critic")):
        pool = RayResourcePool([1], use_gpu=False, name_prefix=f"{role}_pool")
        groups[role] = RayWorkerGroup(
            pool, RayClassWithInitArgs(Role, seed), role=role, worker_env={"OMP_NUM_THREADS": "1"}
        )
    return {"pids": [group.worker_pids[0] for group in groups.values()]}


def update(
    rows: int, length: int, seed: int, sleep_s: float, one_by_one: bool = False
) -> dict[str, Any]:
    """Both updates on a new batch; `one_by_one` waits for the critic first."""
    arrays = columns(rows, length, seed)
    batch = DataProto.from_dict(
        tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
        meta_info={"sleep_s": sleep_s},
    )
    order = range(rows)
    with stopwatch() as seconds:
        futures = {}
        for role in ("critic", "actor"):
            futures[role] = groups[role].update.remote(Ordered(batch, order))
            if one_by_one:
                futures[role].get()
        outputs = {role: future.get() for role, future in futures.items()}
    return {"seconds": seconds[0]} | {
        f"{role}_{name}": output.batch[name].numpy()
        for role, output in outputs.items()
        for name in ("result", "seconds")
    }


if __name__ == "__main__":
    serve(start, update)
