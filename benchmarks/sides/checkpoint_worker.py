"""The worker of `checkpoint`: an actor with random weights and Adam's moments, and the ways to save
them."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.gpu_training import RandomPolicy, policy
from verl_like.trainer.state.checkpoint import begin, commit, keep

state: dict[str, Any] = {}


def start(hidden: int, layers: int) -> dict[str, Any]:
    """Makes the actor; returns the bytes and the tensors of its training state."""
    torch.set_num_threads(1)
    shape = LlamaConfig(
        vocab_size=3000,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    state["worker"] = worker = RandomPolicy(policy("0.5B", "cpu", 32).config, shape)
    worker.init_model()
    # As many as large models have; a checkpoint has them
    words = {f"word {index}": index for index in range(150_000)}
    worker.engine.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))
    state["stager"] = DefaultStager(StagingOptions(*[False] * 4))
    state["run_dir"], state["step"] = Path(tempfile.mkdtemp()), 0
    tensors = worker.engine._state().values()
    return {"num_bytes": sum(tensor.nbytes for tensor in tensors), "num_tensors": len(tensors)}


@torch.no_grad()
def save(way: str) -> dict[str, Any]:
    """Saves, changes the state in place as training does, and reads what was written.

    Seconds: until `save` returns, until all is on the disk, the longest in which this process ran
    no Python meanwhile, and of the commit with the removal of the checkpoint before.
    """
    worker = state["worker"]
    state["step"] = state["step"] + 1
    training = worker.engine._state()
    moved = [tensor.to_local() for name, tensor in training.items() if name.startswith("model.")]
    expected = sums(training)
    os.sync()  # what others wrote is not written meanwhile
    started = time.perf_counter()
    with stopwatch() as held_up:
        partial = begin(state["run_dir"], state["step"])
        is_written, files_of = WAYS[way](worker, partial / "actor/checkpoint")
    torch._foreach_add_(moved, 1.0)
    longest = 0.0
    last = time.perf_counter()
    while not is_written():
        time.sleep(1e-4)
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    seconds = time.perf_counter() - started
    files = {f"actor/checkpoint/{name}": digest for name, digest in files_of().items()}
    with stopwatch() as committing:
        commit(partial, state["step"], {}, files)
        keep(state["run_dir"], 1)
    written = state["run_dir"] / f"global_step_{state['step']}/actor/checkpoint"
    worker.engine.load(str(written))
    np.testing.assert_array_equal(sums(worker.engine._state()), expected)
    return {
        "held_up": held_up[0],
        "written": seconds,
        "standstill": longest,
        "commit": committing[0],
    }


def sums(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Of the bits of each tensor."""
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()
    ]
    return np.array([shard.reshape(-1).view(torch.uint8).sum().item() for shard in local])


def stop() -> dict[str, Any]:
    shutil.rmtree(state["run_dir"])
    return {}


def ours(
    worker: RandomPolicy, folder: Path
) -> tuple[Callable[[], bool], Callable[[], dict[str, Any]]]:
    worker.save_checkpoint(str(folder), wait=False)
    return lambda: worker.save_result(wait=False) is not None, lambda: worker.save_result(wait=True)


def async_save(
    worker: RandomPolicy, folder: Path
) -> tuple[Callable[[], bool], Callable[[], dict[str, Any]]]:
    """torch's own, with a stager that keeps its buffers."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    future = dcp.async_save(
        worker.engine._state(), storage_writer=writer, async_stager=state["stager"]
    )
    return future.done, dict


def synchronous(
    worker: RandomPolicy, folder: Path
) -> tuple[Callable[[], bool], Callable[[], dict[str, Any]]]:
    """torch's own."""
    dcp.save(
        worker.engine._state(),
        storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
    )
    return lambda: True, dict


WAYS = {"ours": ours, "async_save": async_save, "save": synchronous}

if __name__ == "__main__":
    serve(start, save, stop)
