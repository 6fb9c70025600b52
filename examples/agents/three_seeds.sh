#!/usr/bin/env bash
# Both tasks with three seeds, one after the other, and a table of the accuracies.
#   bash examples/agents/three_seeds.sh [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/cpu_environment.sh
runs=()
for task in product two_calls; do
  for seed in 1 2 3; do
    bash examples/agents/run.sh ppo $task $seed "$@"
    runs+=("outputs/verl_like_example_agents/ppo_${task}_$seed/latest")
  done
done
"$python" -m examples.agents.accuracy "${runs[@]}"
