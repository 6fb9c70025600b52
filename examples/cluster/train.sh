#!/usr/bin/env bash
# PPO with a reward model on 16 GPUs of a running Ray cluster, two nodes of 8, each role on a pool of its own.
# Started on a node of the cluster, by ray_job.sh or slurm.sh beside this file:
#   MODEL_PATH=... REWARD_MODEL_PATH=... DATA_DIR=... bash examples/cluster/train.sh [key=value ...]
# MODEL_PATH, REWARD_MODEL_PATH: a folder or a hub name; DATA_DIR: train.parquet and test.parquet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec .venv/bin/python -m verl_like.trainer.main_ppo \
  ray_kwargs.ray_init.address=auto \
  placement=separate \
  'resource_pool_spec.actor_pool=[4]' \
  'resource_pool_spec.critic_pool=[4]' \
  'resource_pool_spec.ref_pool=[2]' \
  'resource_pool_spec.reward_model_pool=[2]' \
  'resource_pool_spec.rollout_pool=[4]' \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.9 \
  algorithm.adv_estimator=gae \
  algorithm.use_kl_in_reward=true \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  critic.model.path="$MODEL_PATH" \
  reward_model.enable=true \
  reward_model.model.path="$REWARD_MODEL_PATH" \
  trainer.experiment_name=separate_pools \
  "$@"
