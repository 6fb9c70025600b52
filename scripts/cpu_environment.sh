# For the scripts that train on the CPU, also where there are GPUs: makes the environment of vLLM's CPU build, whose Python
# is then $python. Sourced in the root of the clone.
bash scripts/environment.sh cpu
python=.venv/bin/python
if nvidia-smi -L >/dev/null 2>&1; then
  python=.venv_cpu/bin/python
  export CUDA_VISIBLE_DEVICES=
fi
