#!/usr/bin/env bash
# GRPO: groups of samples instead of a critic, every role on one pool.
#   bash examples/grpo/run_qwen2_5_7b.sh [key=value ...]
# With GPUs: Qwen2.5-7B-Instruct on GSM8K (MODEL_PATH: a folder or a hub name; DATA_DIR: train.parquet and test.parquet).
# Without: the same dataflow, script and code at toy scale, on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/environment.sh
python=.venv/bin/python

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "No GPU here: the same dataflow runs at toy scale on the CPU (tiny DeepSeek-architecture model, generated arithmetic)."
  toy=(-m verl_like.trainer.main_ppo --config-dir examples/grpo/config --config-name toy "$@")
  "$python" "${toy[@]}" --print-config >/dev/null  # a mistake in the overrides shows before the model is made
  "$python" examples/split_placement/make_toy_world.py --out .toy_world
  exec "$python" "${toy[@]}"
fi

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
exec "$python" -m verl_like.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  'trainer.logger=[console]' \
  trainer.project_name=verl_like_example_gsm8k \
  trainer.experiment_name=qwen2_5_7b_grpo \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "$@"
