"""Worker classes for the tests of what a step puts into the object store."""

import os

import torch

from verl_like.protocol import DataProto
from verl_like.single_controller import Dispatch, Worker, register

PROTO = Dispatch.DP_COMPUTE_PROTO


class Reader(Worker):
    """Reads like the roles of PPO: each method its own columns."""

    @register(dispatch_mode=PROTO, reads=["input_ids", "responses"], writes=["old_log_probs"])
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": batch.batch["responses"] * 0.5})

    @register(dispatch_mode=PROTO, reads=["input_ids", "responses"], writes=["values"])
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"values": batch.batch["responses"] * 2.0})

    @register(dispatch_mode=PROTO, reads=["input_ids", "responses", "old_log_probs", "advantages"])
    def update_actor(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {}})

    @register(dispatch_mode=PROTO, reads=["input_ids", "responses", "values", "returns"])
    def update_critic(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def sums(self, batch: DataProto) -> dict[str, float]:
        """Sum of each column that arrives, padding included."""
        return {
            name: float((tensor.values() if tensor.is_nested else tensor).sum())
            for name, tensor in batch.tensors().items()
        }

    @register(dispatch_mode=PROTO)
    def whole_shard(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=PROTO)
    def only_count(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"rows": len(batch)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mapped_bytes(self) -> int:
        """Resident shared memory of this process."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32)
