"""Memory that is pinned is unpinned before it is freed: CUDA refuses later memory at an address that it still knows."""

import numpy as np
import pytest
import torch

from verl_like.workers.engine.shard_writer import ShardWriter
from verl_like.workers.pinned_memory import pin, to_device
from verl_like.workers.weight_transfer.shared_memory import SharedMemoryTransport


class Runtime:
    """In the place of CUDA's runtime, which this machine may not have: the bytes that are registered, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
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


def test_tensors_go_to_a_device_in_one_piece_of_memory_with_their_values_shapes_and_types():
    tensors = {
        "tokens": torch.arange(21).view(3, 7),
        "mask": torch.tensor([[True, False, True]]),
        "turned": torch.randn(4, 5).t(),
        "half": torch.randn(3).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "number": torch.tensor(2.5),
    }
    moved = to_device(tensors, "cpu:0")  # for torch another place than "cpu"
    assert list(moved) == list(tensors)
    for name, tensor in tensors.items():
        assert moved[name].dtype == tensor.dtype and torch.equal(moved[name], tensor)
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved.values()}) == 1
    assert to_device(tensors, "cpu")["tokens"] is tensors["tokens"]
