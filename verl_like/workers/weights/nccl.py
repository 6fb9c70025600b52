"""Weights that vLLM's NCCL group broadcasts from GPU to GPU. This has not been run on a GPU yet."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from verl_like.workers.weights.direct import DirectTransport, gather
from verl_like.workers.weights.exports import OrderedWeight


class NcclTransport(DirectTransport):
    """Rank 0 broadcasts the parameters to all receivers. NCCL waits for them without a deadline."""

    def _join(self, host: str, port: int, world_size: int) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        place = {"master_address": host, "master_port": port, "world_size": world_size}
        return trainer_init(place)

    def send(self, weights: Sequence[OrderedWeight], rank: int) -> None:
        whole = gather(weights)
        if rank > 0:
            for _ in whole:
                pass
            return
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.synchronize()  # vLLM gathers on streams of its own; it waits for them in the end
        take_tensor = operator.itemgetter(1)  # of (name, tensor) vLLM packs what this returns
        packed_nccl_broadcast_producer(whole, self._group, src=0, post_iter_func=take_tensor)
