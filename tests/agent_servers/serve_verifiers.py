"""Serves a taskset by the EnvServer of verifiers: `python serve_verifiers.py PORT TASKSET`, in its
environment. The harness is its chat loop, in processes of this machine."""

import sys

from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import resolve_env_config

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}

if __name__ == "__main__":
    config = resolve_env_config({"taskset": {"id": sys.argv[2]}, "agent": AGENT})
    serve_env(max_workers=1, address=f"tcp://127.0.0.1:{sys.argv[1]}", config=config)
