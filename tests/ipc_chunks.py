"""vLLM's packed IPC chunks in a buffer of this process instead of one on a GPU that another process
opens."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def packed_chunks(
    whole: Iterable[tuple[str, torch.Tensor]],
    gpu: str,
    buffer: torch.Tensor,
    note: Callable[[str], Any] = str,
) -> Iterator[Any]:
    """As `packed_ipc_producer` of vLLM, which needs a GPU: as many tensors at once as the (bytes,)
    buffer holds."""
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    chunk = PackedIpcChunk([], [], [], [], {gpu: ("handle of", gpu)})
    for name, tensor in whole:
        values = tensor.contiguous().view(-1).view(torch.uint8)
        if sum(chunk.tensor_sizes) + len(values) > len(buffer):
            note("written")
            yield chunk
            chunk = PackedIpcChunk([], [], [], [], chunk.ipc_handle)
        end = sum(chunk.tensor_sizes)
        buffer[end : end + len(values)] = values
        chunk.names.append(name)
        chunk.shapes.append(list(tensor.shape))
        chunk.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
        chunk.tensor_sizes.append(len(values))
    note("written")
    yield chunk


def load_chunk(message: dict[str, Any], gpu: str, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """What vLLM makes of a message of `IpcTransport`: its own class, its own unpacking, and as it
    does copies."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    info = IPCWeightTransferUpdateInfo(**message)
    assert isinstance(info.ipc_handles, dict) and info.ipc_handles[gpu] == ("handle of", gpu)
    dtypes = [getattr(torch, name) for name in info.dtype_names]
    unpacked = unpack_tensor(
        buffer[: sum(info.tensor_sizes)], info.names, info.shapes, dtypes, info.tensor_sizes
    )
    return {name: tensor.clone() for name, tensor in unpacked}
