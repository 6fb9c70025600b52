"""vLLM's calls of the CUDA runtime, which go to the null GPU with numbers and without."""

from types import ModuleType


def use_null_runtime(cuda_wrapper: ModuleType) -> None:
    """vLLM calls the runtime by ctypes, and would find NVIDIA's among the files that torch has
    loaded."""
    cuda_wrapper.find_loaded_library = lambda name: "libcuda.so.1"
