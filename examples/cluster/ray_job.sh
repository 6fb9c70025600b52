#!/usr/bin/env bash
# Submits train.sh as a job to a running Ray cluster and shows its output.
#   RAY_API_SERVER_ADDRESS=http://<head node>:8265 MODEL_PATH=... REWARD_MODEL_PATH=... DATA_DIR=... \
#     bash examples/cluster/ray_job.sh [key=value ...]
# The clone with its environment, the models and the data have the same paths on every node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# The job runs on the head node, in none of our folders and without our variables.
exec .venv/bin/ray job submit -- env MODEL_PATH="$MODEL_PATH" REWARD_MODEL_PATH="$REWARD_MODEL_PATH" \
  DATA_DIR="$DATA_DIR" bash "$PWD/examples/cluster/train.sh" "$@"
