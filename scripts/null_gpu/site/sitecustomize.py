"""Python imports this in each process that has this folder in PYTHONPATH, also in Ray's: numbers on
the null GPU.

Where NULL_GPU_NUMBERS=1, CUDA's kernels are answered as soon as the module is imported that brings
them. Where NULL_GPU_SIZES=1, what cannot be done with garbage is replaced, see null_gpu_sizes.py.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from null_gpu_runtime import use_null_runtime


def _answer_with(name: str) -> Callable[[ModuleType], None]:
    return lambda module: importlib.import_module(name).install()


def _use_multiply(module: ModuleType) -> None:
    importlib.import_module("null_gpu_vllm_experts").use_multiply(module)


# What is done once a module has been imported.
AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch": _answer_with("null_gpu_kernels"),
    "vllm._custom_ops": _answer_with("null_gpu_vllm"),
    "vllm.lora.ops.triton_ops": _answer_with("null_gpu_vllm_lora"),
    "vllm.model_executor.layers.fused_moe.moe_align_block_size": _answer_with(
        "null_gpu_vllm_experts"
    ),
    "vllm.model_executor.layers.fused_moe.fused_moe": _use_multiply,
    "vllm.distributed.device_communicators.cuda_wrapper": use_null_runtime,
    "vllm.vllm_flash_attn.flash_attn_interface": _answer_with("null_gpu_vllm_attention"),
}


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in AFTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_more(module: ModuleType) -> None:
            execute(module)
            AFTER[name](module)

        spec.loader.exec_module = execute_and_more
        return spec


if os.environ.get("NULL_GPU_NUMBERS") == "1":
    if control := os.environ.get("NULL_GPU_CONTROL"):
        from null_gpu_controls import CONTROLS

        module, fault = CONTROLS[control]
        AFTER[module] = fault
    sys.meta_path.insert(0, _AfterImport())
elif os.environ.get("NULL_GPU_SIZES") == "1":
    from null_gpu_sizes import REPLACED

    AFTER = {module: replace for module, (replace, why) in REPLACED.items()}
    sys.meta_path.insert(0, _AfterImport())
