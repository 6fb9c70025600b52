"""Memory that is pinned is unpinned before it is freed: CUDA refuses later memory at an address that it still knows."""

import numpy as np
import pytest
import torch

from verl_like.workers.engine.shard_writer import ShardWriter
from verl_like.workers.pinned_memory import pin
from verl_like.workers.weight_transfer.shared_memory import SharedMemoryTransport


class Runtime:
    """In the place of CUDA's runtime, which this machine may not have: the bytes that are registered, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return runtime


def test_memory_is_pinned_as_long_as_a_tensor_lies_in_it(runtime: Runtime):
    memory = np.empty(640, dtype=np.uint8)
    address = memory.ctypes.data
    pin(memory)
    piece = torch.from_numpy(memory)[64:128].view(torch.float32)
    del memory
    assert runtime.registered == {address: 640}
    del piece
    assert runtime.registered == {}


def test_shared_memory_is_unpinned_with_its_transport(runtime: Runtime):
    transport = SharedMemoryTransport()
    array = transport.allocate(512, pinned=True)
    assert list(runtime.registered.values()) == [512]
    del transport, array
    assert runtime.registered == {}


def test_the_buffers_of_checkpoints_are_unpinned_with_their_writer(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    mesh = {"replica": OneRank(), "shard": OneRank()}
    writer = ShardWriter(0, mesh)
    writer._allocate({"weight": torch.ones(3, 5).as_subclass(OnGpu)})
    assert list(runtime.registered.values()) == [64]  # 60 bytes, aligned
    del writer
    assert runtime.registered == {}


class OneRank:
    """A dimension of a mesh that has one rank."""

    def get_local_rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1
