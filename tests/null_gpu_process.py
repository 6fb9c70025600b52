"""A process that has the null GPU, loaded by ctypes, and does what the test sends it."""

import ctypes
import multiprocessing
import os
import struct
from multiprocessing.connection import Connection
from pathlib import Path

SPAWN = multiprocessing.get_context("spawn")
# NCCL's number of each type that the project sends, and how Python packs it; bfloat16 is the upper
# half of a float32.
TYPES = {
    "int8": (0, "b"),
    "uint8": (1, "B"),
    "int32": (2, "i"),
    "int64": (4, "q"),
    "float16": (6, "e"),
    "float32": (7, "f"),
}
TYPES |= {"float64": (8, "d"), "bfloat16": (9, "")}
SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE = range(5)


class UniqueId(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 128)]


class Size(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


def pack(values: list[float], dtype: str) -> bytes:
    if dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{TYPES[dtype][1]}", *values)


def unpack(data: bytes, dtype: str) -> list[float]:
    if dtype == "bfloat16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return list(
        struct.unpack(f"<{len(data) // struct.calcsize(TYPES[dtype][1])}{TYPES[dtype][1]}", data)
    )


class Gpu:
    """The calls of the null GPU with values of Python; each answers its error code, then what came
    out."""

    def __init__(self, library: Path) -> None:
        self.cuda = ctypes.CDLL(str(library))
        for name in ("null_gpu_used", "null_gpu_most", "null_gpu_pinned"):
            getattr(self.cuda, name).restype = ctypes.c_uint64
        self.cuda.null_gpu_count.restype = ctypes.c_long
        self.cuda.ncclGetLastError.restype = ctypes.c_char_p
        self.pointers: list[ctypes.c_void_p] = []
        self.communicator = ctypes.c_void_p()

    def malloc(self, size: int) -> int:
        self.pointers.append(ctypes.c_void_p())
        return self.cuda.cudaMalloc(ctypes.byref(self.pointers[-1]), ctypes.c_size_t(size))

    def free(self) -> int:
        return self.cuda.cudaFree(self.pointers.pop())

    def register_overlapping(self) -> list[int]:
        """Registers memory, a part of it again, ends the registration, and registers that part."""
        memory = ctypes.create_string_buffer(8192)
        whole, part = ctypes.byref(memory), ctypes.byref(memory, 4096)
        return [
            self.cuda.cudaHostRegister(whole, ctypes.c_size_t(8192), 0),
            self.cuda.cudaHostRegister(part, ctypes.c_size_t(4096), 0),
            self.cuda.cudaHostUnregister(whole),
            self.cuda.cudaHostRegister(part, ctypes.c_size_t(4096), 0),
        ]

    def used(self, device: int) -> int:
        return self.cuda.null_gpu_used(device)

    def most(self, device: int) -> int:
        return self.cuda.null_gpu_most(device)

    def pinned_while(self) -> list[int]:
        """Before anything is pinned, with 300 bytes from CUDA, with 200 more that are registered,
        and after these."""
        pointer, memory = ctypes.c_void_p(), ctypes.create_string_buffer(200)
        sizes = [self.cuda.null_gpu_pinned()]
        self.cuda.cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(300), 0)
        sizes.append(self.cuda.null_gpu_pinned())
        self.cuda.cudaHostRegister(memory, ctypes.c_size_t(200), 0)
        sizes.append(self.cuda.null_gpu_pinned())
        self.cuda.cudaHostUnregister(memory)
        return [*sizes, self.cuda.null_gpu_pinned()]

    def nvml_used(self, device: int) -> int:
        handle, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()  # total, free, used
        self.cuda.nvmlDeviceGetHandleByIndex_v2(device, ctypes.byref(handle))
        assert self.cuda.nvmlDeviceGetMemoryInfo(handle, memory) == 0
        return memory[2]

    def reserve_and_map(self, size: int) -> tuple[int, int]:
        """Virtual memory with a byte written into it: the error, and what is held; `unmap` gives it
        back."""
        self.address, self.handle = ctypes.c_uint64(), ctypes.c_void_p()
        # Pinned, no handle type, on a device, which is 0
        properties = (ctypes.c_int * 8)(1, 0, 1, 0)
        self.cuda.cuMemAddressReserve(
            ctypes.byref(self.address), ctypes.c_size_t(size), ctypes.c_size_t(0), 0, 0
        )
        error = self.cuda.cuMemCreate(
            ctypes.byref(self.handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0)
        )
        if not error:
            self.cuda.cuMemMap(
                self.address,
                ctypes.c_size_t(size),
                ctypes.c_size_t(0),
                self.handle,
                ctypes.c_uint64(0),
            )
            ctypes.memset(self.address.value, 7, 1)
        return error, self.used(0)

    def unmap(self, size: int) -> int:
        self.cuda.cuMemUnmap(self.address, ctypes.c_size_t(size))
        self.cuda.cuMemRelease(self.handle)
        return self.used(0)

    def export(self, data: bytes) -> bytes:
        """The IPC handle of new memory that has these bytes."""
        self.malloc(len(data))
        self.cuda.cudaMemcpy(self.pointers[-1], data, ctypes.c_size_t(len(data)), 1)
        handle = ctypes.create_string_buffer(64)
        assert self.cuda.cudaIpcGetMemHandle(handle, self.pointers[-1]) == 0
        return handle.raw

    def read(self, size: int) -> bytes:
        return ctypes.string_at(self.pointers[-1], size)

    def write_into(self, handle: bytes, data: bytes) -> tuple[int, bytes]:
        """Writes into memory of another process, after reading what is there: the error, and what
        was there."""
        pointer = ctypes.c_void_p()
        error = self.cuda.cudaIpcOpenMemHandle(
            ctypes.byref(pointer), IpcHandle.from_buffer_copy(handle), 0
        )
        if error:
            return error, b""
        before = ctypes.string_at(pointer, len(data))
        ctypes.memmove(pointer, data, len(data))
        return self.cuda.cudaIpcCloseMemHandle(pointer), before

    def count(self, name: str) -> int:
        return self.cuda.null_gpu_count(name.encode())

    def set_device(self, device: int) -> int:
        return self.cuda.cudaSetDevice(device)

    def malloc_in_a_fork(self) -> int:
        child = os.fork()
        if child == 0:
            os._exit(self.malloc(1))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def copies(self) -> None:
        """To the device from pinned memory and from pageable memory, and one that says that it
        waits."""
        device, pinned, pageable = (
            ctypes.c_void_p(),
            ctypes.c_void_p(),
            ctypes.create_string_buffer(8),
        )
        self.cuda.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(8))
        self.cuda.cudaMallocHost(ctypes.byref(pinned), ctypes.c_size_t(8))
        for source in (pinned, pageable):
            self.cuda.cudaMemcpyAsync(device, source, ctypes.c_size_t(8), 1, None)
        self.cuda.cudaMemcpy(device, pinned, ctypes.c_size_t(8), 1)
        self.cuda.cudaStreamSynchronize(None)
        self.cuda.cudaEventSynchronize(None)

    def launch(self, name: bytes) -> int:
        """Launches a kernel of this name, of an extension such as vLLM's."""
        library, function = ctypes.c_void_p(), ctypes.c_char(b"k")
        nothing = [None] * 4
        getattr(self.cuda, "__cudaRegisterFunction")(
            ctypes.byref(library), ctypes.byref(function), name, name, -1, *nothing, None
        )
        size = Size(1, 1, 1)
        return self.cuda.cudaLaunchKernel(
            ctypes.byref(function), size, size, None, ctypes.c_size_t(0), None
        )

    def unique_id(self) -> bytes:
        unique = UniqueId()
        self.cuda.ncclGetUniqueId(ctypes.byref(unique))
        return unique.name

    def join(self, name: bytes, num_ranks: int, rank: int) -> int:
        return self.cuda.ncclCommInitRank(
            ctypes.byref(self.communicator), num_ranks, UniqueId(name), rank
        )

    def split(self, color: int, key: int) -> tuple[int, int, int]:
        """The error, and in the new communicator the number of ranks and this one's; what follows
        runs in it."""
        part, number, rank = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        error = self.cuda.ncclCommSplit(self.communicator, color, key, ctypes.byref(part), None)
        self.communicator = part
        self.cuda.ncclCommCount(part, ctypes.byref(number))
        self.cuda.ncclCommUserRank(part, ctypes.byref(rank))
        return error, number.value, rank.value

    def collective(
        self,
        function: str,
        dtype: str,
        values: list[float],
        num_out: int,
        count: int,
        *numbers: int,
    ) -> tuple[int, list[float] | str]:
        """`numbers`: what stands between the type and the communicator, the operation or the
        root."""
        data = pack(values, dtype)
        out = ctypes.create_string_buffer(num_out * max(1, len(data) // max(1, len(values))))
        arguments = (
            data,
            out,
            ctypes.c_size_t(count),
            TYPES[dtype][0],
            *numbers,
            self.communicator,
            None,
        )
        error = getattr(self.cuda, function)(*arguments)
        return error, self.cuda.ncclGetLastError(self.communicator).decode() if error else unpack(
            out.raw, dtype
        )

    def scaled_sum(self, values: list[float], factor: float) -> tuple[int, list[float] | str]:
        operation, scalar = ctypes.c_int(), ctypes.c_float(factor)
        create = self.cuda.ncclRedOpCreatePreMulSum
        create(
            ctypes.byref(operation), ctypes.byref(scalar), TYPES["float32"][0], 1, self.communicator
        )
        return self.collective(
            "ncclAllReduce", "float32", values, len(values), len(values), operation.value
        )

    def exchange(self, data: bytes, to: int, source: int, num_bytes: int) -> tuple[int, bytes]:
        """Sends `data` and receives at the same time, in a group."""
        out = ctypes.create_string_buffer(num_bytes)
        self.cuda.ncclGroupStart()
        self.cuda.ncclSend(
            data, ctypes.c_size_t(len(data)), TYPES["uint8"][0], to, self.communicator, None
        )
        self.cuda.ncclRecv(
            out, ctypes.c_size_t(num_bytes), TYPES["uint8"][0], source, self.communicator, None
        )
        return self.cuda.ncclGroupEnd(), out.raw


def _serve(connection: Connection, library: Path, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    gpu = Gpu(library)
    while True:
        name, arguments = connection.recv()
        connection.send(getattr(gpu, name)(*arguments))


class GpuProcess:
    """Runs calls of `Gpu` in another process: `start` begins one and `result` waits for it, `call`
    does both."""

    def __init__(self, library: Path, **settings: str) -> None:
        self.settings = settings
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, library, settings), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, name: str, *arguments: object) -> None:
        self.connection.send((name, arguments))

    def result(self) -> object:
        assert self.connection.poll(60), "the process did not answer within 60 s"
        return self.connection.recv()

    def call(self, name: str, *arguments: object) -> object:
        self.start(name, *arguments)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)
