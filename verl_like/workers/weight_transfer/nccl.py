"""Weights broadcast with NCCL, from GPU to GPU, by vLLM's own means. The broadcast was never run."""

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from verl_like.single_controller.worker import reserve_port
from verl_like.workers.weight_sync import WeightExport
from verl_like.workers.weight_transfer.transport import WeightTransport


def init_info(exports: Sequence[WeightExport], first_rank: int, num_receivers: int) -> dict[str, Any]:
    """How vLLM's engine joins: in front of the receivers is the trainer's rank 0; `first_rank` is of its replica."""
    ((host, port),) = [export.address for export in exports if export.address]
    place = {"master_address": host, "master_port": port, "rank_offset": 1 + first_rank}
    return place | {"world_size": 1 + num_receivers, "packed": True}  # packed as `send` does it


def gather(parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters, one after the other; a collective call when there are DTensors."""
    for name, parameter in parameters:
        tensor = parameter.detach().to(dtype)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class NcclTransport(WeightTransport):
    """An export says which parameters come, and what they must be; `send` brings the values while an engine loads."""

    allocate = None  # no memory of the host
    _address: tuple[str, int] | None = None
    _group: Any = None

    def publish(self, export: WeightExport) -> WeightExport:
        if export.rank == 0 and self._address is None:
            self._reserved, port = reserve_port()
            self._address = os.environ["MASTER_ADDR"], port
        return replace(export, address=self._address)

    def send(self, whole: Iterator[tuple[str, torch.Tensor]], rank: int, num_receivers: int) -> None:
        """On all ranks of the trainer: gathers what was exported last; rank 0 broadcasts it to `num_receivers`.

        It waits 5 minutes for these to join at the first time, and in NCCL without a deadline of its own.
        """
        if rank > 0:
            for _ in whole:
                pass
            return
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._group is None:
            host, port = self._address
            self._group = trainer_init({"master_address": host, "master_port": port, "world_size": 1 + num_receivers})
        torch.cuda.synchronize()  # vLLM gathers on streams of its own; it waits for them in the end
        packed_nccl_broadcast_producer(whole, self._group, src=0, post_iter_func=operator.itemgetter(1))
