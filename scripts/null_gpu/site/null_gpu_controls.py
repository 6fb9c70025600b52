"""Faults that a rehearsal has to find: NULL_GPU_CONTROL names the one that the processes of a run
make.

Each changes one thing in a module of the project or of vLLM, right after the module was imported.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

HELD_BYTES = 1_000_000_000
_HOLD = """
import ctypes, sys, time
malloc = ctypes.CDLL("libcuda.so.1").cudaMalloc
error = malloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(int(sys.argv[1])))
print(error, flush=True)
time.sleep(600)
"""


def flipped_weight(exports: ModuleType) -> None:
    """A value of each bucket changes its sign after it was packed."""
    pack = exports._pack

    def flip(*arguments: Any) -> Any:
        data = pack(*arguments)
        data[3:4] ^= 0x80  # the sign of the first float32, or of the second bfloat16
        return data

    exports._pack = flip


def wrong_device(packing: ModuleType) -> None:
    """The labels of a packed batch stay on the CPU."""
    on = packing.PackedBatch.on
    packing.PackedBatch.on = lambda batch, device: dataclasses.replace(
        on(batch, device), labels=batch.labels
    )


def memory_of_another(gpu_worker: ModuleType) -> None:
    """Another process holds memory of the device when vLLM first measures what is free, and ends
    while it profiles."""
    worker = gpu_worker.Worker
    init_device = worker.init_device
    profile = worker.determine_available_memory

    def init_beside_a_holder(self: Any) -> None:
        command = [sys.executable, "-c", _HOLD, str(HELD_BYTES)]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
        assert self.holder.stdout.readline() == b"0\n", "the other process got no memory"
        init_device(self)

    def profile_while_the_holder_ends(self: Any) -> int:
        self.holder.send_signal(signal.SIGKILL)
        self.holder.wait(60)
        return profile(self)

    worker.init_device = init_beside_a_holder
    worker.determine_available_memory = profile_while_the_holder_ends


def stopped_receiver(pynccl: ModuleType) -> None:
    """An engine's process stands still when the weights reach it for the second time, and NCCL
    waits for it."""
    os.environ["NULL_GPU_WAITS_FOR_LOST_RANKS"] = "1"
    os.environ["NULL_GPU_DEADLINE"] = "3600"
    broadcast = pynccl.PyNcclCommunicator.broadcast

    def stop_in_the_second(
        self: Any, tensor: Any, src: int, *arguments: Any, **options: Any
    ) -> None:
        if self.rank != src:
            self.number = getattr(self, "number", 0) + 1
            if self.number == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
        broadcast(self, tensor, src, *arguments, **options)

    pynccl.PyNcclCommunicator.broadcast = stop_in_the_second


CONTROLS = {
    "flipped_weight": ("verl_like.workers.weights.exports", flipped_weight),
    "wrong_device": ("verl_like.workers.models.packing", wrong_device),
    "memory_of_another": ("vllm.v1.worker.gpu_worker", memory_of_another),
    "stopped_receiver": ("vllm.distributed.device_communicators.pynccl", stopped_receiver),
}
