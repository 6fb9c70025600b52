#!/usr/bin/env bash
# Detached GRPO on eight GPUs: a maker with four engines on the first four, a trainer on the others.
#   bash examples/detached/run_qwen2_5_7b.sh [key=value ...]
# Qwen2.5-7B-Instruct on GSM8K (MODEL_PATH: a folder or a hub name; DATA_DIR: train.parquet and test.parquet).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "There is no GPU here; examples/detached/1m1t.sh is the same at toy scale on the CPU." >&2
  exit 2
fi
bash scripts/environment.sh

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
exec .venv/bin/python -m verl_like.trainer.main_detached \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.bypass_mode=True \
  detached.num_makers=1 \
  detached.num_trainers=1 \
  trainer.max_staleness=1 \
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
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
  'trainer.logger=[console]' \
  trainer.project_name=verl_like_example_gsm8k \
  trainer.experiment_name=qwen2_5_7b_detached \
  trainer.n_gpus_per_node=4 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "$@"
