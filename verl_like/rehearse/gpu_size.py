"""The memory of GPUs, as CUDA reports it."""

import re

GPU_BYTES = {
    "A100-40": 39.4 * 2**30,
    "A100-80": 79.1 * 2**30,
    "H100-80": 79.1 * 2**30,
    "H200-141": 139.7 * 2**30,
    "B200-180": 178.4 * 2**30,
}


def bytes_of_gpu(name: str) -> int:
    """The bytes of a GPU that is named in `GPU_BYTES`, or given as a size such as 85.5GB (of 10^9
    bytes). Raises ValueError for anything else."""
    if name in GPU_BYTES:
        return int(GPU_BYTES[name])
    number = re.fullmatch(r"(\d+(\.\d+)?)GB", name)
    gigabytes = float(number[1]) if number else 0.0
    if not gigabytes:
        raise ValueError(
            f"--gpu {name}: give one of {', '.join(GPU_BYTES)}, or a size such as 85.5GB."
        )
    return int(gigabytes * 1e9)
