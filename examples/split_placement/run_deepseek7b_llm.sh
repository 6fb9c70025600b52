#!/usr/bin/env bash
# PPO with split placement: actor and reference on the first half of the devices, critic on the second half.
#   bash examples/split_placement/run_deepseek7b_llm.sh [key=value ...]
# With GPUs: DeepSeek-LLM-7B-chat on GSM8K (MODEL_PATH: a folder or a hub name; DATA_DIR: train.parquet and test.parquet).
# Without: the same dataflow, script and code at toy scale, on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/environment.sh
python=.venv/bin/python

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "No GPU here: the same dataflow runs at toy scale on the CPU (tiny DeepSeek-architecture model, generated arithmetic)."
  toy=(-m verl_like.trainer.main_ppo --config-dir examples/split_placement/config --config-name toy "$@")
  "$python" "${toy[@]}" --print-config >/dev/null  # a mistake in the overrides shows before the warm-up
  "$python" examples/split_placement/make_toy_world.py --out .toy_world
  exec "$python" "${toy[@]}"
fi

MODEL_PATH=${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
exec "$python" -m verl_like.trainer.main_ppo placement=split \
  algorithm.adv_estimator=gae \
  algorithm.use_kl_in_reward=False \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  critic.optim.lr=1e-5 \
  critic.model.path="$MODEL_PATH" \
  critic.model.enable_gradient_checkpointing=True \
  critic.ppo_micro_batch_size_per_gpu=8 \
  critic.model.fsdp_config.param_offload=False \
  critic.model.fsdp_config.optimizer_offload=False \
  trainer.critic_warmup=0 \
  'trainer.logger=[console]' \
  trainer.project_name=verl_like_example_gsm8k \
  trainer.experiment_name=deepseek_llm_7b_split_placement \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=-1 \
  trainer.total_epochs=15 \
  "$@"
