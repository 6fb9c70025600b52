#!/usr/bin/env bash
# Starts a Ray on all nodes of a Slurm job and runs train.sh on it; both end with the job.
#   MODEL_PATH=... REWARD_MODEL_PATH=... DATA_DIR=... sbatch examples/cluster/slurm.sh [key=value ...]
# Submitted from the root of the clone, which with its environment, the models and the data is on a file system of all nodes.
#SBATCH --job-name=verl_like
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
# The last 600 seconds are for a checkpoint: the signal comes to this script (B:), not to the Ray of every node.
#SBATCH --signal=B:TERM@600
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
ray=.venv/bin/ray
head=$(hostname -I | cut -d" " -f1) # this script runs on the first node
export RAY_ADDRESS=$head:6379       # what address=auto finds
export RAY_worker_niceness=0
export RAY_AUTH_MODE=token # lies in ~/.ray
(umask 077 && "$ray" get-auth-token --generate >/dev/null) # for its owner alone
trap 'kill $(jobs -p)' EXIT

wait_for_nodes() {
  timeout 300 bash -c "until $ray status 2>/dev/null | grep -c '^ 1 node_' | grep -qx $1; do sleep 2; done"
}

"$ray" start --head --node-ip-address="$head" --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
wait_for_nodes 1
others=$((SLURM_NNODES - 1))
if ((others)); then
  # srun does not take --cpus-per-task over from sbatch.
  srun --nodes="$others" --ntasks="$others" --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="$SLURMD_NODENAME" \
    "$ray" start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
  wait_for_nodes "$SLURM_NNODES"
fi
bash examples/cluster/train.sh "$@" &
train=$!
trap 'kill -TERM "$train"' TERM # to the driver alone, which needs Ray and the workers until it has saved
wait "$train" || true           # ends at a signal too
wait "$train"
