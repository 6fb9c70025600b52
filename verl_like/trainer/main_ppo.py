"""Trains a language model with PPO or GRPO: `python -m verl_like.trainer.main_ppo key=value ...`.

The configuration is checked before torch, Ray or vLLM are imported; a wrong one ends with exit code 2 and the reason.
"""

import argparse
import sys

from verl_like.trainer.config import ConfigError, PPOConfig, load_config, to_yaml

USAGE = """The run is described by overrides of the form key=value, e.g. data.train_batch_size=256, and by two presets,
placement=colocated|split and device=cuda|cpu. docs/config.md explains every key."""


def config_from_command_line(arguments: list[str]) -> PPOConfig:
    """The checked configuration; exits with code 2 and the reason if there is none, with 0 after --print-config."""
    parser = argparse.ArgumentParser(prog="python -m verl_like.trainer.main_ppo", description=USAGE, allow_abbrev=False)
    parser.add_argument("--config-dir", help="folder of your own YAML files")
    parser.add_argument("--config-name", default="ppo_trainer", help="the YAML file to start from")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.overrides, options.config_name.removesuffix(".yaml"), options.config_dir)
    except ConfigError as error:
        parser.exit(2, f"The configuration cannot run:\n{error}\n")
    if options.print_config:
        sys.stdout.write(to_yaml(config))
        sys.exit(0)
    return config


if __name__ == "__main__":
    try:
        config = config_from_command_line(sys.argv[1:])
        from verl_like.trainer.run_ppo import run_ppo  # torch, Ray and vLLM load only for a configuration that can run

        sys.exit(run_ppo(config))
    except KeyboardInterrupt:
        sys.exit(130)
