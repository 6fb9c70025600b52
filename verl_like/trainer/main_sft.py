"""Fine-tunes a language model on conversations: `python -m verl_like.trainer.main_sft key=value ...`.

The configuration is checked before torch or Ray are imported; a wrong one ends with exit code 2 and the reason.
"""

import sys

from verl_like.trainer import worker_template
from verl_like.trainer.config.command_line import config_from_command_line
from verl_like.trainer.supervised.config import SFTConfig, broken_supervised_rules

USAGE = """The run is described by overrides of the form key=value, e.g. data.train_files=rows.jsonl model.path=folder
trainer.device=cpu; --print-config shows all keys."""
WORKERS = ["verl_like.workers.supervised"]

if __name__ == "__main__":
    try:
        command = "python -m verl_like.trainer.main_sft"
        config = config_from_command_line(SFTConfig, broken_supervised_rules, sys.argv[1:], command, USAGE)
        # On a GPU an import may start CUDA, which a fork cannot use.
        template = worker_template.start(WORKERS) if config.trainer.device == "cpu" else None
        # torch and Ray load only for a run that can start.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        sys.exit(run_supervised(config, template))
    except KeyboardInterrupt:
        sys.exit(130)
