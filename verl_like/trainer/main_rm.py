"""Trains a reward model on preferences: `python -m verl_like.trainer.main_rm key=value ...`."""

from verl_like.trainer.config.command_line import entry_point
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.supervised.config import RMConfig, broken_supervised_rules

if __name__ == "__main__":
    with entry_point(RMConfig, broken_supervised_rules, "main_rm", USAGE, WORKERS) as (config, template):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        raise SystemExit(run_supervised(config, template))
