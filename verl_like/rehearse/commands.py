"""The training commands that can be rehearsed, and the configuration of each."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl_like.trainer.config import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.config.rules import broken_rules
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import (
    DPOConfig,
    ILQLConfig,
    RMConfig,
    SFTConfig,
    broken_supervised_rules,
)

Rules = Callable[[Any], Iterable[str]]
"""Yields the errors of a configuration that breaks rules."""
COMMANDS: dict[str, tuple[type[RunConfig], Rules]] = {
    "main_ppo": (PPOConfig, broken_rules),
    "main_detached": (DetachedConfig, broken_detached_rules),
    "main_sft": (SFTConfig, broken_supervised_rules),
    "main_rm": (RMConfig, broken_supervised_rules),
    "main_dpo": (DPOConfig, broken_supervised_rules),
    "main_ilql": (ILQLConfig, broken_supervised_rules),
}


def config_of(
    command: str,
    overrides: Sequence[str],
    config_name: str | None = None,
    config_dir: str | None = None,
) -> RunConfig:
    """The checked configuration of `python -m verl_like.trainer.<command>`. Raises ConfigError."""
    schema, rules = COMMANDS[command]
    return load_config(schema, rules, overrides, config_name, config_dir)
