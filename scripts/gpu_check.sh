#!/usr/bin/env bash
# Checks and measures what only a GPU can show, in one call of at most ten minutes; without a GPU the same at toy size.
# bash scripts/gpu_check.sh [--only PREFIX ...] [--out FOLDER]; docs/performance.md says what it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then python=python3; fi
device=cpu
if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else export OMP_NUM_THREADS=1; fi
exec "$python" -m benchmarks.gpu_check --device "$device" "$@"
