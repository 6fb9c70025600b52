"""Runs a process on the null GPU of scripts/null_gpu, which counts memory and computes nothing."""

import hashlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "scripts/null_gpu"
GPU_PYTHON = ROOT / "build/gpu_env/.venv/bin/python"
LIMIT_S = 1800
UNLIMITED = 4 * 10**12
"""Bytes of a device on which everything fits. torch reserves several times as many addresses, so
they cannot be arbitrarily many."""
_HAS_CUDA = (
    "import torch, sysconfig; assert torch.version.cuda; print(sysconfig.get_path('purelib'))"
)


class NullGpu:
    """The library of the null GPU, which is built if need be, and a Python with a CUDA build of
    torch.

    Raises ValueError if there is no such Python, no compiler, or no clone of the repository.
    """

    def __init__(self) -> None:
        if not SOURCES.is_dir():
            raise ValueError(
                f"The null GPU is not part of the installed package: {SOURCES} does not exist; "
                "run this in a clone of the repository."
            )
        self.python, site_packages = _python_with_cuda()
        digest = hashlib.sha256()
        for path in sorted(SOURCES.glob("*.[chp]*")):
            digest.update(path.read_bytes())
        digest.update(str(site_packages).encode())
        name = digest.hexdigest()[:16]
        self.folder = ROOT / "build/null_gpus" / name
        self.library = self.folder / "libnullgpu.so"
        if not self.library.exists():
            done = subprocess.run(
                [sys.executable, SOURCES / "build.py", self.folder, site_packages],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise ValueError(f"The null GPU was not built: {lines[-1]}")

    def run(self, module: str, task: Mapping[str, Any], device_bytes: int) -> Any:
        """Runs `python -m module` with a task, on a device of its own, and returns its answer.
        Raises RuntimeError, with the last lines that it printed, if it fails."""
        name = f"rehearse_{uuid.uuid4().hex}"
        search_paths = [str(ROOT)]
        if of_caller := os.environ.get("PYTHONPATH"):
            search_paths.append(of_caller)
        variables = {
            "LD_PRELOAD": str(self.library),
            "LD_LIBRARY_PATH": str(self.folder),
            "NULL_GPU_NAME": name,
            "NULL_GPU_COUNT": "1",
            "NULL_GPU_BYTES": str(device_bytes),
            "NULL_GPU_LARGEST_COPY": str(1 << 20),
            "CUDA_VISIBLE_DEVICES": "0",  # the null GPU, whatever the caller sees of the machine's
            "PYTHONPATH": os.pathsep.join(search_paths),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            done = subprocess.run(
                [self.python, "-m", module, json.dumps(task)],
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        finally:
            for file in Path("/dev/shm").glob(f"null_gpu.{name}.*"):
                file.unlink()
        if done.returncode:
            last_lines = done.stderr.strip().splitlines()[-20:]
            raise RuntimeError("\n".join(last_lines))
        answer = done.stdout.strip().splitlines()[-1]
        return json.loads(answer)


def _python_with_cuda() -> tuple[Path, Path]:
    """A Python with a CUDA build of torch, preferably this one, and its site-packages."""
    for python in (Path(sys.executable), GPU_PYTHON):
        if python.exists():
            done = subprocess.run(
                [python, "-c", _HAS_CUDA], capture_output=True, text=True, timeout=300
            )
            if not done.returncode:
                return python, Path(done.stdout.strip())
    raise ValueError(
        "The rehearsal runs the CUDA build of torch, which neither this Python nor build/gpu_env "
        "has: `make gpu-environment` installs it (9 GB, no GPU needed)."
    )
