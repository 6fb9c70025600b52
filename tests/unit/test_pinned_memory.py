"""Memory that is pinned is unpinned before it is freed: CUDA refuses later memory at an address
that it still knows."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_like.workers import pinned_memory
from verl_like.workers.engine.shard_writer import ShardWriter
from verl_like.workers.pinned_memory import pin, to_device
from verl_like.workers.weights.exports import WeightExport, collect_weights, iterate_weights
from verl_like.workers.weights.shared_memory import SharedMemoryTransport, pin_pages, with_data


class Runtime:
    """In the place of CUDA's runtime, which this machine may not have: the bytes that are
    registered, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.flags: list[int] = []
        self.code = 0
        """What registering answers."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered[address] = num_bytes
        self.flags.append(flags)
        return self.code

    def check_error(self, code: int) -> None:
        """As `torch.cuda.check_error`."""
        if code:
            error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)  # whose __init__ needs CUDA
            error.args = (f"CUDA error {code}",)
            raise error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", runtime.check_error)
    monkeypatch.setattr(pinned_memory, "_forget_last_error", lambda: runtime.flags.append(-1))
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


def exported(values: torch.Tensor, transport: SharedMemoryTransport, version: int) -> WeightExport:
    """What a receiver in this process gets."""
    options = {"dtype": torch.float32, "rank": 0, "world_size": 1, "version": version}
    return transport.publish(
        collect_weights([("w", values)], allocate=transport.allocate, **options)
    )


def test_a_receiver_pins_shared_weights_once_as_memory_that_it_only_reads(runtime: Runtime):
    transport = SharedMemoryTransport()
    first = exported(torch.ones(100), transport, 1)
    pin_pages([first])
    assert list(runtime.registered.values()) == [400] and runtime.flags == [8]
    # As it arrives
    pin_pages([with_data(first, [replace(bucket.data) for bucket in first.buckets])])
    assert runtime.flags == [8]
    ((_, values),) = iterate_weights([first])
    (address,) = runtime.registered
    assert values.data_ptr() == address and torch.equal(values, torch.ones(100))
    second = exported(torch.zeros(100), transport, 2)  # into other memory, as the first is mapped
    pin_pages([second])
    assert runtime.flags == [8, 8] and len(runtime.registered) == 2


def test_a_driver_that_does_not_pin_shared_weights_is_named_once_and_the_weights_are_read(
    runtime: Runtime,
):
    runtime.code = 801  # cudaErrorNotSupported
    transport = SharedMemoryTransport()
    export = exported(torch.full((50,), 3.0), transport, 1)
    with pytest.warns(UserWarning, match=r"does not pin shared weights \(CUDA error 801\)"):
        pin_pages([export])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pin_pages([export])
    assert runtime.flags == [8, -1]  # the error was forgotten, which the next kernel would have met
    assert torch.equal(next(iterate_weights([export]))[1], torch.full((50,), 3.0))


def test_shared_weights_that_are_gone_or_written_anew_are_left_to_the_check_of_all_ranks(
    runtime: Runtime,
):
    gone = exported(torch.ones(10), SharedMemoryTransport(), 1)
    transport = SharedMemoryTransport()
    written = exported(torch.ones(20), transport, 1)
    assert all(segment.lock() for segment in transport._segments)
    pin_pages([gone, written])
    assert not runtime.registered


def test_weights_that_are_no_shared_memory_are_not_pinned(runtime: Runtime):
    pin_pages(
        [
            collect_weights(
                [("w", torch.ones(9))], dtype=torch.float32, rank=0, world_size=1, version=0
            )
        ]
    )
    assert not runtime.registered


def test_the_buffers_of_checkpoints_are_unpinned_with_their_writer(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
):
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
