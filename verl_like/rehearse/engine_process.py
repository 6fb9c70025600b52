"""Measures the process of a rollout engine on the null GPU: start, sleep, and waking for new weights."""

import ctypes
import json
import os
import sys
from dataclasses import asdict

import torch

from verl_like.rehearse.measured import Measured
from verl_like.single_controller.worker import rank_environment
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo_workers import build_role_worker_mapping
from verl_like.trainer.roles import Role


def bytes_in_use() -> int:
    """Of the device, by this process: torch's allocator and vLLM's own."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_used.restype = ctypes.c_uint64
    return library.null_gpu_used(0)


def measure(config: PPOConfig, rank: int, world_size: int) -> list[Measured]:
    """The phases of an engine of one rank."""
    os.environ |= rank_environment(rank, world_size, 0, 1, "cuda")
    made = build_role_worker_mapping(config, {})[Role.Rollout]
    worker = made.cls(*made.args, **made.kwargs)
    phases = []

    def take(phase: str) -> None:
        used = bytes_in_use()
        phases.append(Measured(phase, allocated=used, reserved=used, parts={}))

    worker.init_model()
    take("rollout generation")
    worker.sleep()
    torch.cuda.empty_cache()
    take("rollout asleep" if config.actor_rollout_ref.rollout.free_cache_engine else "rollout waiting")
    return phases


def main() -> None:
    task = json.loads(sys.argv[1])
    config = load_ppo_config(task["overrides"], task["config_name"], task["config_dir"])
    # Triton's and CUDA graphs' kernels are not compiled.
    config = config.updated({"actor_rollout_ref.rollout.enforce_eager": True})
    measured = measure(config, task["rank"], task["world_size"])
    sys.stdout.write(json.dumps([asdict(each) for each in measured]) + "\n")


if __name__ == "__main__":
    main()
