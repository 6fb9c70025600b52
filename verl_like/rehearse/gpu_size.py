"""The memory of GPUs, as CUDA reports it."""

import re

GPU_GIB = {"A100-40": 39.4, "A100-80": 79.1, "H100-80": 79.1, "H200-141": 139.7, "B200-180": 178.4}


def bytes_of_gpu(name: str) -> int:
    """The bytes of a GPU that is named in `GPU_GIB`, or given as a size such as 85.5GB (of 10^9
    bytes). Raises ValueError for anything else."""
    if name in GPU_GIB:
        return int(GPU_GIB[name] * 2**30)
    number = re.fullmatch(r"(\d+(\.\d+)?)GB", name)
    gigabytes = float(number[1]) if number else 0.0
    if not gigabytes:
        raise ValueError(
            f"--gpu {name}: give one of {', '.join(GPU_GIB)}, or a size such as 85.5GB."
        )
    return int(gigabytes * 1e9)
