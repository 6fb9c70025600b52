"""Trains a language model on preferences by DPO or IPO:
`python -m verl_like.trainer.main_dpo key=value ...`."""

from verl_like.trainer.config.supervised import DPOConfig, broken_supervised_rules
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.run.entry_point import entry_point

if __name__ == "__main__":
    with entry_point(DPOConfig, broken_supervised_rules, "main_dpo", USAGE, WORKERS) as (
        config,
        template,
    ):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        raise SystemExit(run_supervised(config, template))
