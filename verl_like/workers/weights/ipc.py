"""Weights that engines read from the trainer's GPU memory by CUDA IPC. This has not been run on a
GPU yet."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from verl_like.workers.weights.direct import DirectTransport, gather
from verl_like.workers.weights.exports import DEFAULT_BUCKET_BYTES, OrderedWeight


class IpcTransport(DirectTransport):
    """Each rank packs the weights, bucket by bucket, into one buffer, which the engine on its GPU
    reads.

    Trainer and engines wait for each other at a store of rank 0, each time for at most 5 minutes.
    """

    def _join(self, host: str, port: int, world_size: int) -> Any:
        from vllm.distributed.utils import StatelessProcessGroup

        return StatelessProcessGroup.create(host, port, 0, world_size)

    @contextmanager
    def joined(self, rank: int, num_receivers: int, receivers: str = "") -> Iterator[None]:
        with super().joined(rank, num_receivers, receivers):
            # The engines take back their memory before this trainer takes memory for the buffer.
            self._barrier(rank)
            yield
            # The buffer is free before the engines take back the memory of their cache.
            self._barrier(rank)

    def send(self, weights: Sequence[OrderedWeight], rank: int) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        index = torch.cuda.current_device()
        gpu = torch.cuda.get_device_properties(index)
        buffer_bytes = DEFAULT_BUCKET_BYTES
        for weight in weights:
            num_bytes = weight.tensor.numel() * weight.dtype.itemsize
            buffer_bytes = max(buffer_bytes, num_bytes)
        whole = gather(weights)
        take_tensor = operator.itemgetter(1)  # of (name, tensor) vLLM packs what this returns
        chunks = packed_ipc_producer(
            whole, str(gpu.uuid), post_iter_func=take_tensor, buffer_size_bytes=buffer_bytes
        )
        self.offer(chunks, rank)
        torch.cuda.ipc_collect()  # frees the buffer, which no engine has open any more

    def offer(self, chunks: Iterable[Any], rank: int) -> None:
        """Has the receivers read vLLM's chunks. A chunk is there on all ranks before it is
        announced, and until all receivers have read it."""
        world_size = dist.get_world_size()
        for chunk in chunks:
            handles: list[Any] = [None] * world_size
            dist.all_gather_object(handles, chunk.ipc_handle)
            if rank == 0:
                handle_of_gpu: dict[Any, Any] = {}
                for of_rank in handles:
                    handle_of_gpu |= of_rank
                message = dict(vars(chunk))
                del message["ipc_handle"]
                message["ipc_handles"] = handle_of_gpu
                self._group.broadcast_obj(message, src=0)
            self._barrier(rank)
        if rank == 0:
            self._group.broadcast_obj(None, src=0)
        self._barrier(rank)

    def _barrier(self, rank: int) -> None:
        """Waits for all ranks of the trainer and all receivers."""
        dist.barrier()
        if rank == 0:
            self._group.barrier()
        dist.barrier()


def receive_chunks(
    group: Any, load: Callable[[dict[str, Any]], None], close: Callable[[], None]
) -> None:
    """Does a receiver's part in `IpcTransport`.

    `load` must have read a chunk when it returns, and `close` must close the buffer.
    """
    group.barrier()  # `joined` begins
    while chunk := group.broadcast_obj(None, src=0):
        load(chunk)
        group.barrier()
    close()
    group.barrier()  # `offer` ends
    group.barrier()  # `joined` ends
