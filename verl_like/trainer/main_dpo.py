"""Trains a language model on preferences, without a reward model: `python -m verl_like.trainer.main_dpo key=value ...`.

The configuration is checked before torch or Ray are imported; a wrong one ends with exit code 2 and the reason.
"""

import sys

from verl_like.trainer.config.command_line import entry_point
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.supervised.config import DPOConfig, broken_supervised_rules

if __name__ == "__main__":
    with entry_point(DPOConfig, broken_supervised_rules, "main_dpo", USAGE, WORKERS) as (config, template):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        sys.exit(run_supervised(config, template))
