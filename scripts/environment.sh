#!/usr/bin/env bash
# Makes the virtual environment .venv if there is none: exact versions, the CPU build of vLLM, or vllm + flash-attn where there is a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
stamp=.venv/.verl_like_installed
wanted=$(cat pyproject.toml requirements/*.lock scripts/environment.sh | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
"$python" -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
echo "Making the environment .venv: a few minutes and about 4 GB, once."
"$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
if nvidia-smi -L >/dev/null 2>&1; then
  pip install -c requirements/gpu.lock torch==2.13.0 wheel packaging psutil ninja "setuptools>=77,<81"
  # flash-attn is compiled, which needs a CUDA toolkit; without it, attention uses torch's own kernel.
  pip install -c requirements/gpu.lock --no-build-isolation -e ".[gpu,dev,tensorboard]" || {
    echo "The gpu extra was not installed whole (is there a CUDA toolkit for flash-attn?); going on without flash-attn."
    pip install -c requirements/gpu.lock -e ".[dev,tensorboard]" vllm==0.32.0
  }
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
