"""Weights that no host memory holds, by vLLM's means: NCCL between GPUs, CUDA IPC on one. Neither
was ever run."""

import operator
import os
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_like.single_controller.worker import reserve_port
from verl_like.workers.weight_sync import DEFAULT_BUCKET_BYTES, WeightExport
from verl_like.workers.weight_transfer.transport import WeightTransport


def init_info(
    exports: Sequence[WeightExport], first_rank: int, num_receivers: int
) -> dict[str, Any]:
    """How vLLM's engine joins: in front of the receivers is the trainer's rank 0; `first_rank` is
    of its replica."""
    ((host, port),) = [export.address for export in exports if export.address]
    place = {"master_address": host, "master_port": port, "rank_offset": 1 + first_rank}
    return place | {"world_size": 1 + num_receivers, "packed": True}  # packed as `send` does it


def gather(
    weights: Iterable[tuple[str, torch.Tensor, torch.dtype]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters and buffers of `in_order`, one by one; a collective call when there are
    DTensors."""
    for name, weight, dtype in weights:
        tensor = weight.detach().to(dtype)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class DirectTransport(WeightTransport):
    """An export says which parameters come, and what they must be; `send` brings the values while
    an engine loads."""

    allocate = None  # type: ignore[assignment]  # no memory of the host

    def __init__(self) -> None:
        self._ports: dict[str, tuple[socket.socket, int]] = {}
        self._groups: dict[str, Any] = {}
        """vLLM's group of rank 0 and some receivers, by their name. That of a maker that has died
        stays, since its end would be a wait for that maker."""
        self._group: Any = None
        """That of the receivers which load now, on rank 0."""

    def address(self, rank: int, receivers: str = "") -> tuple[str, int] | None:
        """Where rank 0 waits for these receivers, who join it once; None on the other ranks."""
        if rank > 0:
            return None
        if receivers not in self._ports:
            self._ports[receivers] = reserve_port()
        return os.environ["MASTER_ADDR"], self._ports[receivers][1]

    def publish(self, export: WeightExport) -> WeightExport:
        return replace(export, address=self.address(export.rank))

    @contextmanager
    def joined(self, rank: int, num_receivers: int, receivers: str = "") -> Iterator[None]:
        """Around `send`, on all ranks of the trainer; at the first time rank 0 waits 5 minutes for
        the receivers."""
        if address := self.address(rank, receivers):
            if receivers not in self._groups:
                self._groups[receivers] = self._join(*address, 1 + num_receivers)
            self._group = self._groups[receivers]
        yield

    @abstractmethod
    def _join(self, host: str, port: int, world_size: int) -> Any:
        """vLLM's group of rank 0 and the receivers."""

    @abstractmethod
    def send(self, weights: Sequence[tuple[str, torch.Tensor, torch.dtype]], rank: int) -> None:
        """On all ranks of the trainer: has the receivers load what was exported last, in the order
        of `in_order`; a collective call."""


class NcclTransport(DirectTransport):
    """Rank 0 broadcasts the parameters to all receivers, in NCCL without a deadline of its own."""

    def _join(self, host: str, port: int, world_size: int) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        return trainer_init({"master_address": host, "master_port": port, "world_size": world_size})

    def send(self, weights: Sequence[tuple[str, torch.Tensor, torch.dtype]], rank: int) -> None:
        whole = gather(weights)
        if rank > 0:
            for _ in whole:
                pass
            return
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.synchronize()  # vLLM gathers on streams of its own; it waits for them in the end
        packed_nccl_broadcast_producer(
            whole, self._group, src=0, post_iter_func=operator.itemgetter(1)
        )


class IpcTransport(DirectTransport):
    """Each rank packs the weights, bucket by bucket, into one buffer, which the engine on its GPU
    reads.

    Rank 0 has a store, by which all wait for each other: 5 minutes at most each time.
    """

    def _join(self, host: str, port: int, world_size: int) -> Any:
        from vllm.distributed.utils import StatelessProcessGroup

        return StatelessProcessGroup.create(host, port, 0, world_size)

    @contextmanager
    def joined(self, rank: int, num_receivers: int, receivers: str = "") -> Iterator[None]:
        with super().joined(rank, num_receivers, receivers):
            # The engines are awake: they asked for their memory before it is taken here
            self._barrier(rank)
            yield
            self._barrier(rank)  # and it is free again before they wake up the cache

    def send(self, weights: Sequence[tuple[str, torch.Tensor, torch.dtype]], rank: int) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        largest = max(tensor.numel() * dtype.itemsize for _, tensor, dtype in weights)
        size = max(DEFAULT_BUCKET_BYTES, largest)
        self.offer(packed_ipc_producer(gather(weights), gpu, operator.itemgetter(1), size), rank)
        torch.cuda.ipc_collect()  # the buffer, which no engine has open any more

    def offer(self, chunks: Iterable[Any], rank: int) -> None:
        """Has the receivers read vLLM's chunks. Each is there on all ranks before, and until all
        have read it."""
        for chunk in chunks:
            handles: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(handles, chunk.ipc_handle)
            if rank == 0:
                fields = {
                    name: value for name, value in vars(chunk).items() if name != "ipc_handle"
                }
                of_gpus = {gpu: handle for each in handles for gpu, handle in each.items()}
                self._group.broadcast_obj(fields | {"ipc_handles": of_gpus}, src=0)
            self._barrier(rank)
        if rank == 0:
            self._group.broadcast_obj(None, src=0)
        self._barrier(rank)

    def _barrier(self, rank: int) -> None:
        dist.barrier()
        if rank == 0:
            self._group.barrier()
        dist.barrier()


def receive_chunks(
    group: Any, load: Callable[[dict[str, Any]], None], close: Callable[[], None]
) -> None:
    """A receiver's part in `IpcTransport`: `load` has read a chunk when it returns, `close` closes
    the buffer."""
    group.barrier()
    while chunk := group.broadcast_obj(None, src=0):
        load(chunk)
        group.barrier()
    close()
    group.barrier()
    group.barrier()
