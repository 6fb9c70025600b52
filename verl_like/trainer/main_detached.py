"""Trains with makers and trainers apart: `python -m verl_like.trainer.main_detached key=value ...`.

The configuration is main_ppo's with a block `detached`; a wrong one ends with exit code 2 before torch is imported.
"""

import sys

from verl_like.trainer import worker_template
from verl_like.trainer.config.command_line import config_from_command_line
from verl_like.trainer.detached.config import DetachedConfig, broken_detached_rules
from verl_like.trainer.main_ppo import USAGE, WORKERS

if __name__ == "__main__":
    try:
        command = "python -m verl_like.trainer.main_detached"
        config = config_from_command_line(DetachedConfig, broken_detached_rules, sys.argv[1:], command, USAGE)
        # On a GPU an import may start CUDA, which a fork cannot use.
        template = worker_template.start(WORKERS) if config.trainer.device == "cpu" else None
        from verl_like.trainer.detached.run_detached import run_detached  # torch, Ray and vLLM load only when needed

        sys.exit(run_detached(config, template))
    except KeyboardInterrupt:
        sys.exit(130)
