"""Writes a rank's part of the training state while training goes on."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl_like.protocol.files import file_digest
from verl_like.workers.engine.host_memory import local_part
from verl_like.workers.pinned_memory import host_places


class ShardWriter:
    """Copies what a rank saves to buffers in host memory, and writes the buffers in a thread.

    The file is one of `torch.distributed.checkpoint`'s safetensors format, whose reader loads the
    files of all ranks on any number of them. Its own writer joins all tensors under Python's lock,
    which in a thread holds training up for several times the copy, and has the ranks communicate.
    `save_file` leaves the lock, and no rank needs the others: of what several ranks hold, each
    writes its share.

    Args:
        rank: in the name of the file.
        mesh: of (replica, shard), over which the parameters lie.
    """

    def __init__(self, rank: int, mesh: DeviceMesh) -> None:
        self.name = f"rank_{rank:05}.safetensors"
        self.mesh = mesh
        self.buffers: dict[str, torch.Tensor] = {}
        self.offsets: dict[str, dict[str, list[int]]] = {}
        """Where each buffer lies in its whole tensor, as the reader wants it."""
        self.threads = ThreadPoolExecutor(2, "checkpoint")
        self.writing: Future[dict[str, dict[str, Any]]]

    @torch.no_grad()  # to_local() is then no operation
    def begin(
        self, state: Mapping[str, torch.Tensor], folder: Path, write_others: Callable[[], None]
    ) -> None:
        """Copies this rank's part of the state, and begins to write it to the folder, after
        `write_others`.

        Every call has the same names and shapes on all ranks. The first one allocates the buffers,
        which stay.
        """
        assert not self.buffers or self.writing.done(), (
            "a copy that is being written lies in the buffers"
        )
        if not self.buffers:
            self._allocate(state)
        buffers = list(self.buffers.values())
        shards = [local_part(state[name]).detach() for name in self.buffers]
        # In two threads: many tensors in small pages take one up to twice as long as one piece of
        # memory.
        halves = [(buffers[first::2], shards[first::2]) for first in range(min(2, len(buffers)))]
        for copy in [
            self.threads.submit(torch._foreach_copy_, *half, non_blocking=True) for half in halves
        ]:
            copy.result()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.writing = self.threads.submit(self._write, folder, write_others)

    def _allocate(self, state: Mapping[str, torch.Tensor]) -> None:
        shards = {}
        for name in list(state)[
            self.mesh["replica"].get_local_rank() :: self.mesh["replica"].size()
        ]:
            tensor = state[name]
            shard = local_part(state[name])
            offsets = [0] * tensor.ndim
            if isinstance(tensor, DTensor):
                offsets = list(tensor.__create_chunk_list__()[0].offsets)
            elif self.mesh["shard"].get_local_rank():
                continue
            if shard.numel():
                self.offsets[name], shards[name] = {SAVED_OFFSETS_KEY: offsets}, shard
        self.buffers = host_places(shards)

    def result(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """The file of the last `begin` by its name, as `file_digest` has it, once it is on the
        disk; before that None, unless `wait`. Raises OSError, naming the file that cannot be
        written."""
        return self.writing.result() if wait or self.writing.done() else None

    def _write(self, folder: Path, write_others: Callable[[], None]) -> dict[str, dict[str, Any]]:
        file = folder / self.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_others()
            save_file(self.buffers, file, {CUSTOM_METADATA_KEY: json.dumps(self.offsets)})
            return {self.name: file_digest(file, sync=True)}
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{file} cannot be written ({error}). Earlier checkpoints are as they were."
            ) from error
