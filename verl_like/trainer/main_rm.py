"""Trains a reward model on preferences: `python -m verl_like.trainer.main_rm key=value ...`."""

from verl_like.trainer.config.supervised import RMConfig, broken_supervised_rules
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.run.entry_point import entry_point

if __name__ == "__main__":
    with entry_point(RMConfig, broken_supervised_rules, "main_rm", USAGE, WORKERS) as (
        config,
        template,
    ):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        raise SystemExit(run_supervised(config, template))
