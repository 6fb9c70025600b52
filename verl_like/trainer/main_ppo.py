"""Trains a language model with PPO or GRPO: `python -m verl_like.trainer.main_ppo key=value ...`.

Keys and values are checked before torch, Ray or vLLM are imported. A configuration that cannot run
ends with exit code 2 and the reason.
"""

from verl_like.trainer.config.rules import broken_rules
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.run.entry_point import entry_point

USAGE = """The run is described by overrides of the form key=value, e.g. data.train_batch_size=256,
and by two presets, placement=colocated|split and device=cuda|cpu. docs/config.md
explains every key."""
WORKERS = [
    f"verl_like.workers.{module}"
    for module in ("actor", "reference", "rollout_worker", "critic", "reward_model")
]

if __name__ == "__main__":
    with entry_point(PPOConfig, broken_rules, "main_ppo", USAGE, WORKERS) as (config, template):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.ppo.run_ppo import run_ppo

        raise SystemExit(run_ppo(config, template))
