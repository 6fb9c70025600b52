"""Composes the tree of presets, YAML files and command-line overrides, before it is resolved and
checked.

Hydra composes presets and files; then the values of overrides are set, in their order.
"""

import functools
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_like.secret_values import MASK, is_secret_name, with_masked_urls
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.keys import default_tree, leaves, suggestion
from verl_like.trainer.config.presets import RESOLVERS
from verl_like.trainer.config.run_config import RunConfig

for resolver in RESOLVERS:
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def compose_tree(
    schema: type[RunConfig],
    overrides: Sequence[str],
    config_name: str | None = None,
    config_dir: str | None = None,
) -> DictConfig:
    """Returns the composed tree before it is resolved and checked."""
    base = schema.base_name
    name_of_trainer = base.removesuffix("_trainer")
    OmegaConf.register_new_resolver("name_of_trainer", lambda: name_of_trainer, replace=True)
    search_path = _search_path(base, config_name or base, config_dir)
    try:
        with initialize_config_module("verl_like.trainer.config", version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            parser = OverridesParser.create(config_loader=loader)
            choices = []
            values = []
            for override in parser.parse_overrides(list(overrides)):
                _check_form(override)
                choice = _as_choice(override, schema, config_dir)
                if choice is None:
                    values.append(override)
                else:
                    choices.append(choice)
            if config_dir is None:
                tree = deepcopy(_composed_presets(schema, tuple(choices)))
            else:
                file = config_name or base
                tree = _composed_by_hydra(schema, file, [*search_path, *choices])
        for override in values:
            if override.is_delete():
                _delete(tree, override)
            else:
                _set(tree, override, schema)
        return tree
    except OverrideParseException as error:
        raise ConfigError(
            f"{_shown_override(str(error.override))}: expected key=value; a value with characters "
            "such as ~ = or , is quoted for Hydra and for the shell: 'key=\"~/a,b\"'"
        ) from error
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise config_error(error) from error


@functools.cache
def _composed_presets(schema: type[RunConfig], choices: tuple[str, ...]) -> DictConfig:
    """Returns the tree of the package's own presets, which Hydra composes once in a process."""
    return _composed_by_hydra(schema, schema.base_name, choices)


def _composed_by_hydra(schema: type[RunConfig], file: str, choices: Sequence[str]) -> DictConfig:
    """Returns the tree of a YAML file and of the files of the chosen presets."""
    store = ConfigStore.instance()
    presets = [{name: default} for name, default in schema.presets.items()]
    defaults = {"defaults": ["_self_", *presets]}
    store.store(name=schema.base_name, node=defaults | default_tree(schema))
    # Hydra opens the first file before it reads the search path, so the first file is ours and
    # names the user's.
    store.store(name="run", node={"defaults": [file, "_self_"]})
    return compose("run", list(choices))


def _search_path(base: str, config_name: str, config_dir: str | None) -> list[str]:
    if config_dir is None:
        if config_name != base:
            raise ConfigError(
                f"--config-name {config_name} needs --config-dir, the folder of {config_name}.yaml"
            )
        return []
    folder = Path(config_dir).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    if (folder / f"{base}.yaml").exists():
        raise ConfigError(
            f"{folder / base}.yaml has the name of the base configuration; give the file another "
            "name"
        )
    if config_name != base and not (folder / f"{config_name}.yaml").is_file():
        found = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError(
            f"--config-name {config_name}: {folder} has no {config_name}.yaml; it has "
            f"{', '.join(found) or 'none'}"
        )
    return [f"hydra.searchpath=[{json.dumps(f'file://{folder}')}]"]


def _check_form(override: Override) -> None:
    """Raises ConfigError for an override that sets a key of Hydra's own, gives several values, or
    has a package (`key@package=value`)."""
    line = override.input_line
    key = override.key_or_group
    assert line is not None
    _, _, text = line.partition("=")
    value = text.strip()
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(
            f"{line}: Hydra's own settings have no effect here; set trainer.default_local_dir "
            "instead"
        )
    if override.package is not None:
        raise ConfigError(f"{_shown_override(line)}: there is no such key, since keys have no @")
    if override.is_sweep_override():
        shown = _shown_override(line)
        if line != shown:
            value = MASK
        raise ConfigError(
            f"{shown}: a comma separates several values and this key takes one: quote it for Hydra "
            f"and for the shell, '{key}=\"{value}\"', or write a list, '{key}=[{value}]'"
        )


def _as_choice(override: Override, schema: type[RunConfig], config_dir: str | None) -> str | None:
    """Returns an override as Hydra takes it if it is of a preset, and None if it is of a value.

    Presets are those of the package and the folders in `config_dir`. Raises ConfigError for a
    preset that the schema does not have.
    """
    line = override.input_line
    key = override.key_or_group
    assert line is not None
    options = []
    if "." not in key:
        options = _group_options(key)
    is_of_user = config_dir is not None and Path(config_dir).expanduser().joinpath(key).is_dir()
    if override.is_delete():
        return line if options or is_of_user else None
    if key in schema.presets:
        if override.value() not in options:
            raise ConfigError(f"{line}: expected one of {', '.join(options)}")
        return line.lstrip("+")
    if options:  # a preset of other trainers, or of Hydra
        raise ConfigError(f"{line}: there is no such key{suggestion(schema, key, ())}")
    # The name of a section stands for the section.
    return line if is_of_user and key not in schema.model_fields else None


def _delete(tree: DictConfig, override: Override) -> None:
    """Deletes a key.

    Raises ConfigError if it is not there, or if `~key=value` names another value than it has.
    """
    key = override.key_or_group
    section, _, name = key.rpartition(".")
    block = OmegaConf.select(tree, section) if section else tree
    if not isinstance(block, DictConfig) or name not in block:
        raise ConfigError(f"~{key}: there is no such key to delete")
    named = override.value()
    if named is not None and named != block[name]:
        raise ConfigError(f"~{key}: it has another value, so it is not deleted")
    with open_dict(block):
        del block[name]


def _set(tree: DictConfig, override: Override, schema: type[RunConfig]) -> None:
    """Sets a value. It adds an unknown key, as Hydra does with ++, and `unknown_keys` reports it.

    Raises ConfigError for a value that OmegaConf does not take there.
    """
    key = override.key_or_group
    line = override.input_line
    assert line is not None
    value = _value_of(override, schema)
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        shown = _shown_override(line)
        why = ""
        if shown == line:  # else the error may name a secret
            why = f" ({str(error).splitlines()[0]})"
        raise ConfigError(
            f"{shown}: the key cannot be set to this value{why}; {schema.keys_are_listed_by} lists "
            "all keys with their values"
        ) from error


def _value_of(override: Override, schema: type[RunConfig]) -> Any:
    """Returns the value that an override sets."""
    value = override.value()
    assert override.input_line is not None
    _, _, text = override.input_line.partition("=")
    given = text.strip()
    is_number = isinstance(value, int | float)
    is_call = "(" in given
    if is_number and not is_call and "_" in given and _takes_text(schema, override.key_or_group):
        return given  # 0.5_5 is a band, not the number 0.55 as in YAML
    return value


@functools.cache
def _group_options(key: str) -> list[str]:
    """Returns the names of the files of a config group, or none for a key that is no group."""
    loader = GlobalHydra.instance().config_loader()
    return loader.get_group_options(key)


def _takes_text(schema: type[RunConfig], key: str) -> bool:
    for path, model, name in leaves(schema):
        if path == key:
            annotation = model.model_fields[name].annotation
            return annotation is str or str in get_args(annotation)
    return False


def _shown_override(line: str) -> str:
    """Returns the override as messages show it: without its value if the key has the name of a
    secret."""
    key, sign, value = line.partition("=")
    names = key.split(".")
    if any(map(is_secret_name, names)):
        return f"{key}{sign}{MASK}"
    return f"{key}{sign}{with_masked_urls(value)}"


def config_error(error: Exception) -> ConfigError:
    """Returns what Hydra, OmegaConf or YAML raised as a ConfigError, in a line that names the key
    if it is known."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__ or cause.__context__
    # A resolver of the presets raised it, and OmegaConf wrapped it in its own words
    if cause is not None:
        return cause
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}")
    # Hydra adds where it looked, and most of these places are the package's own.
    text, _, _ = str(error).partition("\nConfig search path:")
    return ConfigError(text.strip())
