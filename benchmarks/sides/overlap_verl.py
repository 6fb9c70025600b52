"""verl's side of `overlap`: its worker group, in the order of its trainer, which waits for the
critic before it calls the actor (verl/trainer/ppo/ray_trainer.py, `fit`, "update critic" and
"update actor")."""

from typing import Any

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.overlap_work import columns

groups: dict[str, Any] = {}


@ray.remote
class Role(Worker):
    def __init__(self, seed: int) -> None:
        super().__init__()
        from benchmarks.sides.overlap_work import Device

        self.role_device = Device(seed)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update(self, batch: DataProto) -> DataProto:
        result_B, seconds = self.role_device.update(
            dict(batch.batch.items()), batch.meta_info["sleep_s"]
        )
        return DataProto.from_dict(
            tensors={"result": result_B, "seconds": torch.full((len(result_B),), seconds)}
        )


def start() -> dict[str, Any]:
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for seed, role in enumerate(("actor", "critic")):
        pool = RayResourcePool(
            process_on_nodes=[1], use_gpu=False, max_colocate_count=1, name_prefix=role
        )
        groups[role] = RayWorkerGroup(
            resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(Role, seed=seed)
        )
    return {}


def update(rows: int, length: int, seed: int, sleep_s: float) -> dict[str, Any]:
    """Both updates on a new batch."""
    arrays = columns(rows, length, seed)
    batch = DataProto.from_dict(
        tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
        meta_info={"sleep_s": sleep_s},
    )
    outputs = {}
    with stopwatch() as seconds:
        for role in ("critic", "actor"):
            outputs[role] = groups[role].update(batch).get()
    return {"seconds": seconds[0]} | {
        f"{role}_{name}": output.batch[name].numpy()
        for role, output in outputs.items()
        for name in ("result", "seconds")
    }


if __name__ == "__main__":
    serve(start, update)
