#!/usr/bin/env bash
# ILQL beside behaviour cloning, on random walks, three seeds on the CPU.
#   bash examples/ilql/run.sh [key=value ...]     keys of the ILQL runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/cpu_environment.sh
config=(--config-dir examples/ilql/config --config-name)
runs=outputs/verl_like_example_ilql
for seed in 1 2 3; do
  folder=$runs/$seed
  "$python" -m examples.ilql.walks --out "$folder" --seed $seed
  own=("model.path=$folder/model" "trainer.seed=$seed")
  "$python" -m verl_like.trainer.main_ilql "${config[@]}" ilql "${own[@]}" "data.train_files=$folder/walks.jsonl" \
    "trainer.default_local_dir=$folder/ilql" "$@"
  "$python" -m verl_like.trainer.main_sft "${config[@]}" best "${own[@]}" "data.train_files=$folder/best.jsonl" \
    "trainer.default_local_dir=$folder/best"
done
"$python" -m examples.ilql.scores $runs/1 $runs/2 $runs/3
