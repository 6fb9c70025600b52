"""Python imports this in each process that has this folder in PYTHONPATH, also in Ray's: numbers on the null GPU.

Where NULL_GPU_NUMBERS=1, CUDA's kernels are answered as soon as the module is imported that brings them.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

# What answers the kernels of a module.
ANSWERS = {
    "torch": "null_gpu_kernels",
    "vllm._custom_ops": "null_gpu_vllm",
    "vllm.vllm_flash_attn.flash_attn_interface": "null_gpu_vllm_attention",
}


class _AnswerAfterImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in ANSWERS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_answer(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(ANSWERS[name]).install()

        spec.loader.exec_module = execute_and_answer
        return spec


if os.environ.get("NULL_GPU_NUMBERS") == "1":
    sys.meta_path.insert(0, _AnswerAfterImport())
