#!/usr/bin/env bash
# Makes the virtual environment .venv if there is none: exact versions, vLLM for CUDA 13 where there is a GPU, else its CPU build.
#   bash scripts/environment.sh [cpu]     with cpu: the CPU build, which is in .venv_cpu where there is a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
venv=.venv device=cpu
if nvidia-smi -L >/dev/null 2>&1; then
  if [ "${1:-}" = cpu ]; then venv=.venv_cpu; else device=gpu; fi
fi
stamp=$venv/.verl_like_installed
wanted="$device $(cat pyproject.toml requirements/*.* scripts/environment.sh | sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
"$python" -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then  # Debian has them in a package of their own
  echo "$python has no venv and ensurepip, which make $venv: install its package, apt install ${python##*/}-venv." >&2
  exit 1
fi
if [ "$device" = gpu ]; then
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader)  # a line for each GPU
  if [ "${driver%%.*}" -lt 580 ]; then
    echo "The NVIDIA driver ${driver%%$'\n'*} is too old for CUDA 13, which needs 580 or newer: update the driver." >&2
    exit 1
  fi
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if ! command -v gcc >/dev/null || [ ! -f "$header" ]; then
    echo "Triton compiles C when a kernel first runs, which needs gcc and $header: install the packages gcc and python3-dev." >&2
    exit 1
  fi
fi
echo "Making the environment $venv: a few minutes and about 4 GB (12 GB with CUDA), once."
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
if [ "$device" = gpu ]; then
  pip install -r requirements/gpu.in
else
  # torch first, and by its exact version: nothing after it may replace the build. Where the package index has no
  # separate CPU build, its default build runs on the CPU too.
  echo "  torch ..."
  pip install torch==2.13.0+cpu 2>/dev/null || pip install torch==2.13.0
  echo "  Ray, vLLM, transformers and what they need ..."
  pip install --no-deps -r requirements/cpu.lock
  pip install --no-deps -e .
fi
echo "$wanted" > "$stamp"
