"""Measures the rollout engine of a run on the null GPU: vLLM starts, sleeps, takes weights and
generates."""

import contextlib
import ctypes
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from verl_like.rehearse.commands import config_of
from verl_like.rehearse.host import heap_bytes, pinned_bytes, unwritten
from verl_like.rehearse.measured import Measured
from verl_like.single_controller.worker import rank_environment
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.roles import POLICY_KEY
from verl_like.trainer.config.schema import PPOConfig
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.models.lora import model_buffers, trained_parameters
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import empty_model
from verl_like.workers.rollout import base
from verl_like.workers.rollout.request import GenerationRequest, Sampling
from verl_like.workers.rollout.vllm_engine import VllmEngine
from verl_like.workers.weights.exports import WeightBucket, WeightExport, in_order
from verl_like.workers.weights.file_layout import file_layout

NUM_STEPS = 3
"""How many steps the engine does: one for the prompt, and the others for the tokens after it."""


class Device:
    """Measures this process on the null GPU, which also counts the memory that vLLM takes without
    torch's allocator."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.library.null_gpu_most.restype = ctypes.c_uint64
        self.measured: list[Measured] = []
        self.engine: VllmEngine | None = None
        """It is kept until the process ends. If it were freed while it sleeps, torch would free
        memory that does not exist any more."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, int]]:
        """Measures the code inside as a phase, by the most memory that the device holds in it. The
        code writes the parts of this memory into the dictionary."""
        self.library.null_gpu_most(0)
        parts: dict[str, int] = {}
        yield parts
        most = self.library.null_gpu_most(0)
        self.measured.append(
            Measured(
                name,
                allocated=most,
                reserved=most,
                parts=parts,
                heap=heap_bytes(),
                pinned=pinned_bytes(),
            )
        )


class RealSizeEngine(VllmEngine):
    """The run's engine. It reads no weights, and has no captured graphs, which need a real GPU."""

    def _make(self, **arguments: Any) -> Any:
        arguments["load_format"] = "dummy"
        arguments["enforce_eager"] = True
        return super()._make(**arguments)


def replace_what_needs_numbers() -> None:
    """Replaces Triton's kernels, which need a compiler for a GPU, and the tokenizer, which the
    model's folder may not have."""
    from triton.runtime.jit import JITFunction
    from vllm.distributed.device_communicators import cuda_wrapper

    jit_function: Any = JITFunction
    jit_function.run = lambda *_, **options: None
    wrapper: Any = cuda_wrapper
    # vLLM calls the CUDA runtime by ctypes. It would find NVIDIA's, which torch has loaded.
    wrapper.find_loaded_library = lambda name: "libcuda.so.1"
    engine: Any = base
    engine.load_tokenizer = lambda config: None
    engine.special_token_ids = lambda tokenizer, path: ((0,), 0)


def weights_of(model: TrainedModelConfig, dtype: str) -> WeightExport:
    """An export of the whole policy, with a bucket for each tensor of a file. Its memory is never
    written.

    This memory is counted nowhere, because it is not the engine's: a run has it in the object store
    or in the actor's memory, once on each node.
    """
    hf = empty_model(model, PolicyModel.auto_class, key=POLICY_KEY)
    policy = PolicyModel(hf)
    parameters = trained_parameters(policy.hf)
    torch_dtype = getattr(torch, dtype)
    layout = {} if model.lora_rank else file_layout(policy.hf)
    weights = in_order(parameters, torch_dtype, model_buffers(policy.hf), layout)
    buckets: list[WeightBucket] = []
    for weight in weights:
        for file in weight.files:
            bucket = WeightBucket(
                index=len(buckets),
                names=(file.name,),
                shapes=(file.shape,),
                dtype=str(weight.dtype).removeprefix("torch."),
                data=unwritten(math.prod(file.shape) * weight.dtype.itemsize),
            )
            buckets.append(bucket)
    return WeightExport(
        version=1,
        rank=0,
        world_size=1,
        dtype=dtype,
        num_tensors=len(buckets),
        num_buckets=len(buckets),
        fingerprints={},
        buckets=tuple(buckets),
    )


def measure(config: PPOConfig, device: Device) -> str:
    """Measures the phases of an engine in one process. Returns a note about its cache."""
    policy = config.actor_rollout_ref
    # There is no actor that could send weights while the engine loads them.
    settings = policy.rollout.model_copy(update={"weight_transport": "object_store"})
    seed = config.trainer.seed
    with device.phase("rollout start") as of_start:
        engine = RealSizeEngine(
            settings, policy.model, rank=0, world_size=1, seed=seed, device="cuda"
        )
        of_start |= parts_of(engine)
    device.engine = engine
    if settings.free_cache_engine:
        engine._sleep()
    with device.phase("rollout load") as of_load:
        engine.wake()
        engine._load([weights_of(policy.model, settings.dtype)], 1)
        of_load |= parts_of(engine)
    with device.phase("rollout generation") as of_generation:
        generate(engine, settings.prompt_length)
        of_generation |= parts_of(engine)
    if settings.free_cache_engine:
        engine._sleep()
    with device.phase("between calls"):
        pass
    return about_cache(engine)


def generate(engine: VllmEngine, prompt_length: int) -> None:
    """Has the engine read a prompt of full length and generate some tokens, which are arbitrary."""
    sampling = Sampling(
        temperature=1.0, top_k=-1, top_p=1.0, max_tokens=NUM_STEPS, stop_token_ids=()
    )
    prompt = [0] * prompt_length
    engine._submit([GenerationRequest("rehearsed", prompt, 1, sampling)])
    for _ in range(NUM_STEPS):
        engine.llm.llm_engine.step()


def parts_of(engine: VllmEngine) -> dict[str, int]:
    """The bytes of the device that the model and the cache take."""
    executor = engine.llm.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    model = runner.get_model()
    tensors = [*model.parameters(), *model.buffers()]
    weights = sum(tensor.nbytes for tensor in tensors)
    storages = {}  # layers may share one
    for cache in runner.kv_caches:
        storage = cache.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return {"weights": weights, "cache": sum(storages.values())}


def about_cache(engine: VllmEngine) -> str:
    """Says how many tokens the cache has room for."""
    cache = engine.llm.llm_engine.vllm_config.cache_config
    num_tokens = cache.num_gpu_blocks * cache.block_size
    longest = engine.config.prompt_length + engine.config.response_length
    room = (
        f"Its cache has room for {num_tokens:,} tokens: {num_tokens // longest} sequences of "
        "full length."
    )
    return room if engine.config.enforce_eager else f"{room} Captured graphs are not counted."


def main() -> None:
    command = json.loads(sys.argv[1])
    config = config_of(**command)
    assert isinstance(config, PPOConfig)
    if isinstance(config, DetachedConfig):
        first_maker = config.detached.maker_names[0]
        config = config.of_maker(first_maker)
    os.environ |= rank_environment(0, 1, 0, 1, "cuda")
    replace_what_needs_numbers()
    device = Device()
    note = measure(config, device)
    phases = [asdict(phase) for phase in device.measured]
    answer = json.dumps({"phases": phases, "note": note})
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
    os._exit(0)  # the engine is not shut down


if __name__ == "__main__":
    main()
