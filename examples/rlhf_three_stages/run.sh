#!/usr/bin/env bash
# Three stages at toy scale on the CPU: fine-tuning, a reward model on generated preferences, PPO against it.
#   bash examples/rlhf_three_stages/run.sh [key=value ...]     keys of the PPO run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/cpu_environment.sh
config=(--config-dir examples/rlhf_three_stages/config --config-name)
runs=outputs/verl_like_example_three_stages
reward_model=$runs/reward_model/latest/global_step_500/model/huggingface
ppo=(-m verl_like.trainer.main_ppo "${config[@]}" ppo "reward_model.model.path=$reward_model" "$@")
"$python" "${ppo[@]}" --print-config >/dev/null  # a mistake in the overrides shows before the first stage

echo "Stage 1: fine-tuning on answers more than half of which are wrong."
"$python" examples/split_placement/make_toy_world.py --out .toy_world

echo "Stage 2: a reward model, on preferences among the responses of the fine-tuned model."
"$python" -m examples.rlhf_three_stages.make_pairs --out $runs/pairs
"$python" -m verl_like.trainer.main_rm "${config[@]}" rm "data.train_files=$runs/pairs/train.jsonl" \
  "data.val_files=$runs/pairs/val.jsonl"

echo "Stage 3: PPO against the reward model; the true reward is only looked at."
"$python" "${ppo[@]}"
"$python" -m examples.rlhf_three_stages.effects --world .toy_world --reward_model $runs/reward_model/latest --ppo $runs/ppo/latest
