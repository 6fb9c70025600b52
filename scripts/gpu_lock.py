"""Resolves the GPU environment for each Python, installing nothing, and compares it with
requirements/gpu.lock.

uv resolves: it reads a package's markers for the Python that is asked for, pip for the Python that
runs it. With `--write` the result becomes the lock: delete the lines of the packages that may
change, then write.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements/gpu.lock"
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = (
    "# Exact versions of the GPU environment (Linux, x86-64, Python 3.11 to 3.13); `make "
    "gpu-lock-check`.\n"
)
# Every package has a wheel for Ubuntu 22.04 (glibc 2.35) and newer, but Hydra's parser, which is
# pure Python.
MACHINE = ("--python-platform", "x86_64-manylinux_2_35")
WHEELS = ("--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime")


def resolve(python: str, pins: set[str]) -> set[str]:
    """A pin for every package that scripts/environment.sh installs on a machine with GPUs and this
    Python.

    Args:
        pins: versions to keep, besides those of the lock.

    Raises:
        SystemExit: the packages contradict each other or these pins; uv has printed which.
    """
    uv = [
        str(Path(sys.executable).with_name("uv")),
        "--quiet",
        "pip",
        "compile",
        "--python",
        sys.executable,
    ]
    target = ["--python-version", python, *MACHINE, *WHEELS, "--no-header", "--no-annotate"]
    command = [*uv, *target, "--constraints", "-", "requirements/gpu.in"]
    resolved = subprocess.run(
        command, cwd=ROOT, input="\n".join(pins), stdout=subprocess.PIPE, text=True
    )
    if resolved.returncode:
        raise SystemExit(
            "requirements/gpu.in cannot be installed with requirements/gpu.lock on Python "
            f"{python}."
        )
    return {line for line in resolved.stdout.splitlines() if "==" in line}


def main() -> None:
    pins: set[str] = set()
    for python in PYTHONS:
        pins |= resolve(python, pins)
    resolved = HEADER + "".join(
        f"{pin}\n" for pin in sorted(pins, key=lambda pin: pin.partition("=="))
    )
    if "--write" in sys.argv[1:]:
        LOCK.write_text(resolved)
    elif resolved != LOCK.read_text():
        locked = LOCK.read_text().splitlines()
        wanted = resolved.splitlines()
        lacking = ", ".join(line for line in wanted if line not in locked) or "nothing"
        surplus = ", ".join(line for line in locked if line not in wanted) or "nothing"
        raise SystemExit(
            f"requirements/gpu.lock, sorted by name, lacks: {lacking}; has without need: {surplus}."
        )
    pythons = ", ".join(PYTHONS)
    print(
        f"requirements/gpu.lock: {len(pins)} packages, resolved from their own metadata for Python "
        f"{pythons}."
    )


if __name__ == "__main__":
    main()
