from collections.abc import Sequence

from verl_like.trainer.config.compose import load_config, to_yaml
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.rules import broken_rules
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.schema import PPOConfig


def load_ppo_config(
    overrides: Sequence[str], config_name: str | None = None, config_dir: str | None = None
) -> PPOConfig:
    """`load_config` of a PPO run."""
    return load_config(PPOConfig, broken_rules, overrides, config_name, config_dir)
