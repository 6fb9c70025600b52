"""A whole run of a model that is too large to have numbers here: memory is given out and never
filled.

Kernels do nothing, so what is read from a device is whatever lies there. Each replacement says why
there has to be one; nothing else is replaced. NULL_GPU_SIZES=1 installs them in every process of a
run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from null_gpu_runtime import use_null_runtime


def _models_without_weights(pretrained: ModuleType) -> None:
    load = pretrained.load_pretrained

    def load_empty(*arguments: Any, weights: bool, **options: Any) -> Any:
        model = load(*arguments, weights=False, **options)
        return model.to_empty(device="cpu") if weights else model

    pretrained.load_pretrained = load_empty


def _heads_without_kernels(linear_log_prob: ModuleType) -> None:
    def kernels(x_MC: Any) -> Any:
        from verl_like.rehearse.training_process import NoKernels  # imports this module

        return NoKernels

    linear_log_prob._kernels = kernels


def _metrics_of_one(mini_batches: ModuleType) -> None:
    def read_metrics(parts: Any) -> Any:
        from verl_like.rehearse.training_process import read_ones  # imports this module

        return read_ones(parts)

    mini_batches.read_metrics = read_metrics


def _steps_without_a_norm_and_models_without_files(fsdp: ModuleType) -> None:
    fsdp.MAX_SKIPPED_STEPS = 10**9
    fsdp.FsdpEngine.save_hf = lambda engine, path: Path(path).mkdir(parents=True, exist_ok=True)


def _fingerprints_of_zero(fingerprints: ModuleType) -> None:
    fingerprints.read_fingerprints = lambda sums: dict.fromkeys(sums, 0)


def _finite_log_probs(vllm_engine: ModuleType) -> None:
    make = vllm_engine.completion

    def completion(request: Any) -> Any:
        made = make(request)
        return replace(made, log_probs=[-1.0] * len(made.token_ids))

    vllm_engine.completion = completion


def _one_token_a_step(async_utils: ModuleType) -> None:
    get_output = async_utils.AsyncOutput.get_output

    def get_tokens(output: Any) -> Any:
        output.num_sampled_tokens_np[:] = 1  # each prompt is computed in one step
        output.sampled_token_ids[:] = 1
        return get_output(output)

    async_utils.AsyncOutput.get_output = get_tokens


def _any_end_of_a_response(base: ModuleType) -> None:
    base.check_completion = lambda *_, **options: None


def _engines_that_are_not_compared(engine_check: ModuleType) -> None:
    engine_check.require_one_model = lambda *_: None


def _finite_values(model_worker: ModuleType) -> None:
    compute = model_worker.forward

    def forward(*arguments: Any) -> tuple[Any, ...]:
        return tuple(values.zero_() for values in compute(*arguments))

    model_worker.forward = forward


def _checkpoints_without_tensors(shard_writer: ModuleType) -> None:
    shard_writer.save_file = lambda buffers, file, metadata: file.write_bytes(b"")


def _places_that_nobody_writes(pinned_memory: ModuleType) -> None:
    from verl_like.rehearse.host import Unreserved

    pinned_memory.np = Unreserved()


def _triton_without_a_compiler(jit: ModuleType) -> None:
    jit.JITFunction.run = lambda *_, **options: None


REPLACED: dict[str, tuple[Callable[[ModuleType], None], str]] = {
    "verl_like.workers.models.pretrained": (
        _models_without_weights,
        "weights are allocated and never filled",
    ),
    "verl_like.workers.models.linear_log_prob": (
        _heads_without_kernels,
        "the head has Triton kernels, too",
    ),
    "verl_like.workers.engine.mini_batches": (
        _metrics_of_one,
        "metrics of garbage may be no numbers",
    ),
    "verl_like.workers.engine.fsdp": (
        _steps_without_a_norm_and_models_without_files,
        "a norm of garbage may be no number, for ever; a model's folder would be 14 GB of zeros",
    ),
    "verl_like.workers.weights.fingerprints": (
        _fingerprints_of_zero,
        "fingerprints of garbage differ",
    ),
    "verl_like.workers.rollout.vllm_engine": (_finite_log_probs, "log-probabilities are garbage"),
    "vllm.v1.worker.gpu.async_utils": (_one_token_a_step, "so are tokens and their number"),
    "verl_like.workers.rollout.base": (
        _any_end_of_a_response,
        "a response ends where garbage is the last token",
    ),
    "verl_like.trainer.ppo.engine_check": (
        _engines_that_are_not_compared,
        "log-probabilities of garbage differ",
    ),
    "verl_like.workers.model_worker": (
        _finite_values,
        "values and log-probabilities may be no numbers",
    ),
    "verl_like.workers.engine.shard_writer": (
        _checkpoints_without_tensors,
        "a checkpoint would be 80 GB of garbage",
    ),
    "verl_like.workers.pinned_memory": (
        _places_that_nobody_writes,
        "80 GB of a checkpoint are not there",
    ),
    "triton.runtime.jit": (
        _triton_without_a_compiler,
        "Triton's kernels need a compiler for a GPU",
    ),
    "vllm.distributed.device_communicators.cuda_wrapper": (
        use_null_runtime,
        "vLLM would find NVIDIA's runtime among the files that torch has loaded",
    ),
}
