"""Runs a measuring process on the null GPU of scripts/null_gpu."""

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
SOURCES = ROOT / "scripts" / "null_gpu"
GPU_ENVIRONMENT = ROOT / "build" / "gpu_env" / ".venv"
LIMIT_S = 1800
UNLIMITED = 4 * 10**12
"""Bytes of a device on which everything fits; torch reserves as many addresses, several times."""
_HAS_CUDA = (
    "import torch, sysconfig; assert torch.version.cuda; print(sysconfig.get_path('purelib'))"
)


class NullGpu:
    """The library, built for the CUDA build of torch, and the Python that has that build.

    Raises ValueError where there is no such Python, no compiler, or no clone of the repository.
    """

    def __init__(self) -> None:
        if not SOURCES.is_dir():
            raise ValueError(
                f"The null GPU is not part of the installed package: {SOURCES} does not exist; "
                "run this in a clone of the repository."
            )
        self.python, site_packages = _python_with_cuda()
        state = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[chp]*")))
        name = hashlib.sha256(state + str(site_packages).encode()).hexdigest()[:16]
        self.folder = ROOT / "build" / "null_gpus" / name
        self.library = self.folder / "libnullgpu.so"
        if not self.library.exists():
            command = [
                sys.executable,
                str(SOURCES / "build.py"),
                str(self.folder),
                str(site_packages),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode:
                raise ValueError(
                    f"The null GPU was not built: {done.stderr.strip().splitlines()[-1]}"
                )

    def run(self, module: str, task: Mapping[str, Any], device_bytes: int) -> Any:
        """What `python -m module` answers to a task, on a device of its own; RuntimeError has its
        last lines."""
        name = f"rehearse_{uuid.uuid4().hex}"
        variables = {
            "LD_PRELOAD": str(self.library),
            "LD_LIBRARY_PATH": str(self.folder),
            "NULL_GPU_NAME": name,
            "NULL_GPU_COUNT": "1",
            "NULL_GPU_BYTES": str(device_bytes),
            "NULL_GPU_LARGEST_COPY": str(1 << 20),
            "CUDA_VISIBLE_DEVICES": "0",  # the null GPU, whatever the caller sees of the machine's
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(self.python), "-m", module, json.dumps(task)]
        try:
            done = subprocess.run(
                command,
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        finally:
            for file in Path("/dev/shm").glob(f"null_gpu.{name}.*"):
                file.unlink()
        if done.returncode:
            raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-20:]))
        return json.loads(done.stdout.strip().splitlines()[-1])


def _python_with_cuda() -> tuple[Path, Path]:
    """A Python whose torch is built for CUDA, this one if it is, and its site-packages."""
    for python in (Path(sys.executable), GPU_ENVIRONMENT / "bin" / "python"):
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
