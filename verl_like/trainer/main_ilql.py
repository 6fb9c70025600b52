"""Trains a language model on scored conversations by ILQL:
`python -m verl_like.trainer.main_ilql key=value ...`."""

from verl_like.trainer.config.supervised import ILQLConfig, broken_supervised_rules
from verl_like.trainer.main_sft import USAGE, WORKERS
from verl_like.trainer.run.entry_point import entry_point

if __name__ == "__main__":
    with entry_point(ILQLConfig, broken_supervised_rules, "main_ilql", USAGE, WORKERS) as (
        config,
        template,
    ):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        raise SystemExit(run_supervised(config, template))
