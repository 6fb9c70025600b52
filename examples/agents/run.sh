#!/usr/bin/env bash
# A tiny model learns to use a calculator, on the CPU.
#   bash examples/agents/run.sh ppo|detached product|two_calls SEED [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
trainer=${1:?ppo or detached} task=${2:?product or two_calls} seed=${3:?a number}
source scripts/cpu_environment.sh
world=.calculator_world/$seed
run=(-m "verl_like.trainer.main_$trainer" --config-dir examples/agents/config --config-name "$trainer"
  "data.train_files=$world/$task/train.parquet" "data.val_files=$world/$task/test.parquet"
  "actor_rollout_ref.model.path=$world/model" "trainer.seed=$seed" "trainer.experiment_name=${trainer}_${task}_$seed" "${@:4}")
"$python" "${run[@]}" --print-config >/dev/null  # a mistake in the overrides shows before the warm-up
"$python" -m examples.agents.make_world --out "$world" --seed "$seed"
exec "$python" "${run[@]}"
