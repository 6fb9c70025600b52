#!/usr/bin/env bash
# A tiny Qwen3 mixture of experts learns to carry, on the CPU.
#   bash examples/experts/run.sh ppo|detached SEED [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
trainer=${1:?ppo or detached} seed=${2:?a number}
source scripts/cpu_environment.sh
world=.experts_world/$seed
run=(-m "verl_like.trainer.main_$trainer" --config-dir examples/experts/config --config-name "$trainer"
  "data.train_files=$world/train.parquet" "data.val_files=$world/test.parquet"
  "actor_rollout_ref.model.path=$world/model" "trainer.seed=$seed" "trainer.experiment_name=${trainer}_$seed" "${@:3}")
"$python" "${run[@]}" --print-config >/dev/null  # a mistake in the overrides shows before the warm-up
"$python" examples/split_placement/make_toy_world.py --out "$world" --seed "$seed" --experts 8
exec "$python" "${run[@]}"
