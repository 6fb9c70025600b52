"""Trains with PPO or GRPO in makers and trainers that run apart:
`python -m verl_like.trainer.main_detached key=value ...`.

The configuration is that of main_ppo with a further block `detached`. It is checked before torch is
imported; a wrong one ends the process with exit code 2 and the reason.
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
