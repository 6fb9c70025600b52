from verl_like.trainer.config.compose import load_config, to_yaml
from verl_like.trainer.config.presets import ConfigError
from verl_like.trainer.config.schema import PPOConfig

__all__ = ["ConfigError", "PPOConfig", "load_config", "to_yaml"]
