"""Reads the command line of any trainer's entry point."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from verl_like.trainer.config.compose import load_config, to_yaml
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.run_config import RunConfig

Schema = TypeVar("Schema", bound=RunConfig)


def config_from_command_line(
    schema: type[Schema],
    rules: Callable[[Schema], Iterable[str]],
    arguments: list[str],
    prog: str | None = None,
    description: str | None = None,
) -> Schema:
    """The checked configuration; exits with code 2 and the reason if there is none, with 0 after
    --print-config."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config-dir", help="folder of custom YAML files")
    parser.add_argument(
        "--config-name", default=schema.base_name, help="the YAML file to start from"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    name = options.config_name.removesuffix(".yaml")
    try:
        config = load_config(schema, rules, options.overrides, name, options.config_dir)
    except ConfigError as error:
        parser.exit(2, f"The configuration cannot run:\n{error}\n")
    if options.print_config:
        sys.stdout.write(to_yaml(config))
        sys.exit(0)
    return config
