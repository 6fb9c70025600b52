"""Writes a rank's part of the training state to a file while training continues."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl_like.files import file_digest
from verl_like.workers.engine.base import FileDigests
from verl_like.workers.engine.host_memory import local_part
from verl_like.workers.pinned_memory import host_places


class ShardWriter:
    """Copies a rank's part of the state to buffers in host memory, and writes them in a thread.

    The file has the safetensors format of `torch.distributed.checkpoint`, whose reader loads the
    files of all ranks on any number of ranks. The writer of that package is not used: it joins all
    tensors while it holds Python's global lock, so that it stops training for several times as long
    as the copy, and the ranks communicate. `save_file` releases the lock. No rank needs the others:
    if several ranks have the same tensors, each writes a share of them.

    Args:
        rank: this rank, for the name of the file.
        mesh: the mesh of (replica, shard), over which the parameters are distributed.
    """

    def __init__(self, rank: int, mesh: DeviceMesh) -> None:
        self.name = f"rank_{rank:05}.safetensors"
        self.mesh = mesh
        self.buffers: dict[str, Tensor] = {}
        self.offsets: dict[str, Any] = {}
        """The offsets of each buffer in its whole tensor, in the form that the reader needs."""
        self.threads = ThreadPoolExecutor(2, "checkpoint")
        self.writing: Future[FileDigests]

    @torch.no_grad()  # to_local() is then no operation
    def begin(
        self, state: Mapping[str, Tensor], folder: Path, write_others: Callable[[], None]
    ) -> None:
        """Copies this rank's part of the state, then begins to write it to the folder in a thread.

        The thread calls `write_others` first. Every call must have the same names and shapes; the
        first one allocates the buffers for all. The last file must be written before the next call.
        """
        assert not self.buffers or self.writing.done(), (
            "a copy that is being written lies in the buffers"
        )
        if not self.buffers:
            self._allocate(state)
        buffers = list(self.buffers.values())
        shards = [local_part(state[name]).detach() for name in self.buffers]

        def copy_half(first: int) -> None:
            torch._foreach_copy_(buffers[first::2], shards[first::2], non_blocking=True)

        # Two threads copy half of the tensors each. One thread takes up to twice as long for many
        # tensors in small pages as for one piece of memory.
        num_halves = min(2, len(buffers))
        copies = self.threads.map(copy_half, range(num_halves))
        list(copies)  # waits for both
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.writing = self.threads.submit(self._write, folder, write_others)

    def _allocate(self, state: Mapping[str, Tensor]) -> None:
        """Chooses the tensors that this rank writes, and allocates a buffer for each of them.

        Replicas take turns over the names. Tensors that are not sharded are written by the first
        rank of a replica.
        """
        replica = self.mesh["replica"]
        names = list(state)
        own_names = names[replica.get_local_rank() :: replica.size()]
        shards = {}
        for name in own_names:
            tensor = state[name]
            shard = local_part(tensor)
            offsets = [0] * tensor.ndim
            if isinstance(tensor, DTensor):
                chunk = tensor.__create_chunk_list__()[0]
                offsets = list(chunk.offsets)
            elif self.mesh["shard"].get_local_rank():
                continue
            if shard.numel():
                self.offsets[name] = {SAVED_OFFSETS_KEY: offsets}
                shards[name] = shard
        self.buffers = host_places(shards)

    def result(self, wait: bool) -> FileDigests | None:
        """Returns `file_digest` of the file of the last `begin`, by its name, once it is written.

        Before that it waits if `wait` is True, and otherwise returns None. Raises OSError, which
        names the file, if it cannot be written.
        """
        if wait or self.writing.done():
            return self.writing.result()
        return None

    def _write(self, folder: Path, write_others: Callable[[], None]) -> FileDigests:
        """Writes the buffers to the file, in a thread, and returns its `file_digest` by its
        name."""
        file = folder / self.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_others()
            save_file(self.buffers, file, {CUSTOM_METADATA_KEY: json.dumps(self.offsets)})
            digest = file_digest(file, sync=True)
            return {self.name: digest}
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{file} cannot be written ({error}). Earlier checkpoints are as they were."
            ) from error
