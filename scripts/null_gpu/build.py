"""Builds the null GPU: `python scripts/null_gpu/build.py OUT [SITE_PACKAGES]`.

OUT/libnullgpu.so stands for the CUDA runtime, cuBLAS and NCCL where it is preloaded, and by two
other names, which OUT in LD_LIBRARY_PATH finds, for the driver and NVML. With the site-packages of
an environment that has torch's CUDA build, each CUDA function that a library there asks for and
that no source here answers becomes a stub.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libnullgpu.so"
ANSWERED = re.compile(r"(__cuda|cuda|cu[A-Z]|cublas|nccl|nvml)\w+")
# cuBLAS is created with a context, and torch reads these of the handle; all else that it does are
# kernels.
HARMLESS = re.compile(
    r"cublas(Lt)?(Create|Destroy|Set|Get)\w*|nccl\w*(Register|Deregister)|cuda\w*(MemPool|PeerAccess)\w*"
)


def require_compiler() -> None:
    """RuntimeError where there is none."""
    if not shutil.which("gcc") or not shutil.which("nm"):
        raise RuntimeError("The null GPU is C, which gcc builds: install gcc and binutils.")


def build(out: Path, site_packages: Path | None = None) -> Path:
    """The library's path in `out`, which is made; RuntimeError says what is missing or what gcc
    answered."""
    require_compiler()
    out.mkdir(parents=True, exist_ok=True)
    sources = [path for path in sorted(HERE.glob("*.c")) if path.name != "properties.c"]
    include = []
    if site_packages:
        include = [f"-I{site_packages}/nvidia/cu13/include"]
        sources.append(HERE / "properties.c")
        core = _compile(out / "core.so", sources, include)
        stubs = sorted(_asked(site_packages) - _symbols(core, "--defined-only"))
        core.unlink()
        (out / "stubs.c").write_text(_stubs(stubs))
        sources.append(out / "stubs.c")
    library = _compile(out / LIBRARY, sources, include)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(LIBRARY)
    return library


def environment(out: Path, *, name: str, count: int, size: int) -> dict[str, str]:
    """For processes whose CUDA is `count` null GPUs of `size` bytes, shared by all that have this
    `name`.

    They see all of them, whatever the caller sees of the machine's.
    """
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
        "LD_PRELOAD": str(out / LIBRARY),
        "LD_LIBRARY_PATH": str(out),
        "NULL_GPU_NAME": name,
        "NULL_GPU_COUNT": str(count),
        "NULL_GPU_BYTES": str(size),
    }


def _compile(library: Path, sources: list[Path], include: list[str]) -> Path:
    flags = ["-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{HERE}", *include]
    command = [
        "gcc",
        *flags,
        f"-Wl,-soname,{library.name}",
        "-o",
        str(library),
        *map(str, sources),
        "-ldl",
        "-lpthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode or done.stderr:  # a warning is an error here: signatures are written by hand
        raise RuntimeError(f"gcc did not build the null GPU:\n{done.stderr}")
    return library


def _symbols(library: Path, which: str) -> set[str]:
    done = subprocess.run(
        ["nm", "-D", which, "-j", str(library)], capture_output=True, text=True, timeout=300
    )
    return {line.partition("@")[0] for line in done.stdout.split()}


def _asked(site_packages: Path) -> set[str]:
    """The CUDA functions that the libraries ask for, except NVIDIA's own, of which each knows the
    others.

    The whole runtime is among them, since the null GPU stands in its place, and what torch looks up
    by name when it needs it, which are strings of its library.
    """
    libraries = [
        path
        for path in site_packages.rglob("*.so*")
        if path.is_file() and "nvidia" not in path.parts
    ]
    asked = set().union(*(_symbols(library, "--undefined-only") for library in libraries))
    texts = (site_packages / "torch/lib/libc10_cuda.so").read_bytes().split(b"\0")
    asked |= _symbols(site_packages / "nvidia/cu13/lib/libcudart.so.13", "--defined-only")
    asked |= {text.decode() for text in texts if re.fullmatch(rb"(nvml|cu)[A-Z]\w+", text)}
    return {symbol for symbol in asked if ANSWERED.fullmatch(symbol)}


def _stubs(names: list[str]) -> str:
    """C: a function a name, which says that it was called and returns "not supported" where numbers
    count."""
    lines = ['#include "null_gpu.h"']
    for name in names:
        # 3: not supported
        error = "3" if name.startswith("nvml") else f'unanswered("{name}", NOT_SUPPORTED)'
        error = "SUCCESS" if HARMLESS.fullmatch(name) else error
        lines.append(f"EXPORT int {name}(void) {{ return {error}; }}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
