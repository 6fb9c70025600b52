"""The worker of verl_like's side of `overlap`."""

import torch

from benchmarks.sides.overlap_work import Device
from verl_like.protocol import DataProto
from verl_like.single_controller import Dispatch, Worker, register


class Role(Worker):
    def __init__(self, seed: int) -> None:
        self.role_device = Device(seed)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update(self, batch: DataProto) -> DataProto:
        result_B, seconds = self.role_device.update(dict(batch.batch), batch.meta_info["sleep_s"])
        return DataProto.from_dict(
            tensors={"result": result_B, "seconds": torch.full((len(result_B),), seconds)}
        )
