"""vLLM's end of the transports `nccl` and `ipc`. This has not been run on a GPU yet.

vLLM imports this module in the process of its worker; nothing else does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo

from verl_like.workers.weights.ipc import receive_chunks


@dataclass(kw_only=True)
class DirectInitInfo(NCCLWeightTransferInitInfo):
    """Where the trainer waits (`init_info`), and by which `rollout.weight_transport` it sends."""

    transport: str


class IpcReceiver(IPCWeightTransferEngine):
    """vLLM's engine for CUDA IPC, which is told of each chunk of an update through the trainer's
    store."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins the trainer."""
        self.packed = init_info.packed
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = StatelessProcessGroup.create(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )

    def receive_weights(self, update_info: Any) -> None:
        """Loads all chunks; what `update_info` announces is in them."""
        receive_chunks(self._group, self._load_chunk, self._packed_importer.close)

    def _load_chunk(self, chunk: dict[str, Any]) -> None:
        super().receive_weights(IPCWeightTransferUpdateInfo(**chunk))
        # The trainer writes the next chunk when this one has been read.
        torch.cuda.synchronize()
