"""Trains a reward model on preferences: `python -m verl_like.trainer.main_rm key=value ...`.

The configuration is checked before torch or Ray are imported; a wrong one ends with exit code 2 and the reason.
"""

import sys

from verl_like.trainer import worker_template
from verl_like.trainer.config.command_line import config_from_command_line
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.supervised.config import RMConfig, broken_supervised_rules

if __name__ == "__main__":
    try:
        command = "python -m verl_like.trainer.main_rm"
        config = config_from_command_line(RMConfig, broken_supervised_rules, sys.argv[1:], command, USAGE)
        # On a GPU an import may start CUDA, which a fork cannot use.
        template = worker_template.start(WORKERS) if config.trainer.device == "cpu" else None
        # torch and Ray load only for a run that can start.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        sys.exit(run_supervised(config, template))
    except KeyboardInterrupt:
        sys.exit(130)
