"""Resolves the GPU environment, installing nothing, and compares the result with requirements/gpu.lock.

With `--write` the result becomes the lock: delete the lines of the packages that may change, then write.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements/gpu.lock"
HEADER = "# Exact versions of the GPU environment (Linux, x86-64, Python 3.11); `make gpu-lock-check`.\n"


def resolve() -> str:
    """The text of a lock with every package that scripts/environment.sh installs on a machine with GPUs.

    Raises:
        SystemExit: the packages contradict each other or the present lock; pip has printed which.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        plan = ["--dry-run", "--ignore-installed", "--report", report.name, "-r", "requirements/gpu.in"]
        if subprocess.run([*pip, *plan], cwd=ROOT).returncode:
            raise SystemExit("requirements/gpu.in cannot be installed with requirements/gpu.lock.")
        packages = [entry["metadata"] for entry in json.load(report)["install"]]
    names = {package["name"].lower().replace("_", "-"): package["version"] for package in packages}
    names.pop("verl-like")
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(names.items()))


def main() -> None:
    resolved = resolve()
    if "--write" in sys.argv[1:]:
        LOCK.write_text(resolved)
    elif resolved != LOCK.read_text():
        different = set(resolved.splitlines()) ^ set(LOCK.read_text().splitlines())
        raise SystemExit("requirements/gpu.lock is not what is installed: " + ", ".join(sorted(different)))
    print(
        f"requirements/gpu.lock: {resolved.count('==')} packages, resolved from their own metadata without a conflict."
    )


if __name__ == "__main__":
    main()
