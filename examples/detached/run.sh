#!/usr/bin/env bash
# Detached training at toy scale on the CPU, with some makers and trainers.
#   bash examples/detached/run.sh MAKERS TRAINERS [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
makers=${1:?number of makers} trainers=${2:?number of trainers}
source scripts/cpu_environment.sh
run=(-m verl_like.trainer.main_detached --config-dir examples/detached/config --config-name toy
  "detached.num_makers=$makers" "detached.num_trainers=$trainers" "${@:3}")
"$python" "${run[@]}" --print-config >/dev/null  # a mistake in the overrides shows before the warm-up
"$python" examples/split_placement/make_toy_world.py --out .toy_world
exec "$python" "${run[@]}"
