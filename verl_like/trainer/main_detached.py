"""Trains with makers and trainers apart: `python -m verl_like.trainer.main_detached key=value ...`.

The configuration is main_ppo's with a block `detached`; a wrong one ends with exit code 2 before
torch is imported.
"""

from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.run.entry_point import entry_point

USAGE = """The run is described by overrides of the form key=value, e.g. detached.num_makers=2,
and by the preset device=cuda|cpu. The pools are resource_pool_spec.maker_pool and .trainer_pool.
docs/detached.md explains the keys of the block detached, docs/config.md all others."""

if __name__ == "__main__":
    with entry_point(DetachedConfig, broken_detached_rules, "main_detached", USAGE, WORKERS) as (
        config,
        template,
    ):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.detached.run_detached import run_detached

        raise SystemExit(run_detached(config, template))
