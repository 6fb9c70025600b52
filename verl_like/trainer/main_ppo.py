"""Trains a language model with PPO or GRPO: `python -m verl_like.trainer.main_ppo key=value ...`.

The configuration is checked before torch, Ray or vLLM are imported; a wrong one ends with exit code 2 and the reason.
"""

import sys

from verl_like.trainer import worker_template
from verl_like.trainer.config.command_line import config_from_command_line
from verl_like.trainer.config.rules import broken_rules
from verl_like.trainer.config.schema import PPOConfig

USAGE = """The run is described by overrides of the form key=value, e.g. data.train_batch_size=256, and by two presets,
placement=colocated|split and device=cuda|cpu. docs/config.md explains every key."""
WORKERS = [
    f"verl_like.workers.{module}" for module in ("actor", "reference", "rollout_worker", "critic", "reward_model")
]

if __name__ == "__main__":
    try:
        command = "python -m verl_like.trainer.main_ppo"
        config = config_from_command_line(PPOConfig, broken_rules, sys.argv[1:], command, USAGE)
        # On a GPU an import may start CUDA, which a fork cannot use.
        template = worker_template.start(WORKERS) if config.trainer.device == "cpu" else None
        from verl_like.trainer.run_ppo import run_ppo  # torch, Ray and vLLM load only for a configuration that can run

        sys.exit(run_ppo(config, template))
    except KeyboardInterrupt:
        sys.exit(130)
