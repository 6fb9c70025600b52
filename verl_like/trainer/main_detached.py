"""Trains with makers and trainers apart: `python -m verl_like.trainer.main_detached key=value ...`.

The configuration is main_ppo's with a block `detached`; a wrong one ends with exit code 2 before torch is imported.
"""

from verl_like.trainer.config.command_line import entry_point
from verl_like.trainer.detached.config import DetachedConfig, broken_detached_rules
from verl_like.trainer.main_ppo import USAGE, WORKERS

if __name__ == "__main__":
    with entry_point(DetachedConfig, broken_detached_rules, "main_detached", USAGE, WORKERS) as (config, template):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.detached.run_detached import run_detached

        raise SystemExit(run_detached(config, template))
