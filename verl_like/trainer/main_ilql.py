"""Trains a language model on scored conversations by ILQL: `python -m verl_like.trainer.main_ilql key=value ...`."""

from verl_like.trainer.config.command_line import entry_point
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.supervised.config import ILQLConfig, broken_supervised_rules

if __name__ == "__main__":
    with entry_point(ILQLConfig, broken_supervised_rules, "main_ilql", USAGE, WORKERS) as (config, template):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        raise SystemExit(run_supervised(config, template))
