"""Makes one checked configuration of any schema from presets, YAML files and command-line
overrides.

Hydra composes and OmegaConf resolves. The models of the schema then decide which keys and values
exist, so an unknown key is refused however it is written (`a.b=1`, `+a.b=1`, `++a.b=1` or YAML).
Then the plugins and the chosen algorithms are imported, whose own options are keys too, and the
rules are checked.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from verl_like.algorithms.registry import AlgorithmOptions, option_keys
from verl_like.config_model import ConfigModel, OpenConfigModel
from verl_like.plugins import import_plugins
from verl_like.secret_values import MASK, differing_paths, has_mask, without_secret_variables
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.keys import last_name, unknown_keys, values_of
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.tree import compose_tree, config_error

Model = TypeVar("Model", bound=ConfigModel)
Schema = TypeVar("Schema", bound=RunConfig)


def load_config(
    schema: type[Schema],
    rules: Callable[[Schema], Iterable[str]],
    overrides: Sequence[str],
    config_name: str | None = None,
    config_dir: str | None = None,
) -> Schema:
    """Composes and checks the configuration of a run.

    Raises ConfigError for an unknown key, a value of the wrong type, a missing key or a broken
    rule; the text names each of them in full and says what to do.

    Args:
        schema: the model of the whole configuration; it holds every default.
        rules: what joins several keys; yields a sentence for each broken rule.
        overrides: Hydra overrides, e.g. `["placement=split", "trainer.nnodes=2"]`.
        config_name: the YAML file to start from, without its ending; None starts from the schema's
            defaults.
        config_dir: folder of the user's YAML files, which start with `defaults:
            [<schema.base_name>, _self_]`.
    """
    composed = compose_tree(schema, overrides, config_name, config_dir)
    raw = OmegaConf.to_container(composed, resolve=False)
    names = {
        key: OmegaConf.select(composed, key, throw_on_resolution_failure=False)
        for key in schema.algorithm_keys
    }

    def may_be_an_option(path: str, block: type[ConfigModel]) -> bool:
        return issubclass(block, OpenConfigModel) and any(
            registry.may_declare(names[key], last_name(path))
            for key, registry in schema.algorithm_keys.items()
        )

    problems = list(unknown_keys(schema, raw, may_be_an_option))
    for key, value in values_of(raw):
        if value == "???":
            problems.append(f"{'.'.join(key)}: this key has no default, set it")
    _raise_if_any(problems)
    resolved = _resolved(composed)
    _raise_if_any(
        f"{'.'.join(key)}: a secret stands as {MASK} in the record of a run; give the secret itself"
        for key, value in values_of(resolved)
        if has_mask(value)
    )
    # First without the algorithms' own options, for which plugins are imported
    config = _validated(schema, resolved, schema.base_name)
    options = _algorithm_options(schema, names, config.plugins)
    paths = []
    for declared in options:
        paths += option_keys(declared)
    _raise_if_any(unknown_keys(schema, raw, lambda path, _: path in paths, paths))
    if config.plugins:
        resolved = _resolved(composed)  # again: a key follows what a plugin's loss declares
    for declared in options:
        section = declared.section.split(".")
        block = functools.reduce(dict.__getitem__, section, resolved)
        given = {name: block[name] for name in declared.model_fields if name in block}
        checked = _validated(declared, given, schema.base_name, section)
        block.update(checked.model_dump())
    config = _validated(schema, resolved, schema.base_name)
    secret_paths = _secret_paths(raw, resolved)
    config = config.with_secret_paths(secret_paths)
    _raise_if_any(rules(config))
    return config


def _secret_paths(raw: Any, resolved: Any) -> frozenset[tuple[str, ...]]:
    """Returns the keys of the values that would be others if variables with the name of a secret
    had another text."""
    without = without_secret_variables(raw)
    if without == raw:
        return frozenset()
    try:
        other = OmegaConf.to_container(OmegaConf.create(without), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"a variable with the name of a secret is no text here: {error}"
        ) from error
    return frozenset(differing_paths(resolved, other))


def _resolved(composed: DictConfig) -> Any:
    """Returns the tree as plain data, with the values of the keys that others follow."""
    try:
        return OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise config_error(error) from error


def _algorithm_options(
    schema: type[RunConfig], names: Mapping[str, str], plugins: Sequence[str]
) -> list[type[AlgorithmOptions]]:
    """Imports the plugins; returns the classes of the chosen algorithms' own options."""
    key = ""
    found = []
    try:
        import_plugins(plugins)
        for key, registry in schema.algorithm_keys.items():
            found.append(registry.options_of(names[key]))
    except ValueError as error:
        raise ConfigError(f"{key}={names[key]}: {error}" if key else str(error)) from error
    return [declared for declared in found if declared]


def _validated(model: type[Model], values: Any, base: str, path: Sequence[str] = ()) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        _raise_if_any(_explain(detail, base, path) for detail in error.errors())
        raise


def to_yaml(config: RunConfig) -> str:
    """Returns the resolved configuration as YAML. `load_config` reads it back, but for secrets, for
    which `***` stands."""
    shown = OmegaConf.create(config.shown())
    return OmegaConf.to_yaml(shown)


def _explain(detail: Any, base: str, prefix: Sequence[str]) -> str:
    names = [*prefix, *map(str, detail["loc"])]
    path = ".".join(names) or "configuration"
    given = detail["input"]
    if detail["type"] == "missing":
        return (
            f"{path}: this key is not set; set it, or start the YAML file with 'defaults: "
            f"[{base}, _self_]'"
        )
    if detail["type"] == "extra_forbidden":
        return f"{path}: there is no such key"
    if detail["type"] == "value_error":
        problem = detail["ctx"]["error"]
        if isinstance(given, dict):
            return f"{path}: {problem}"
        return f"{path}={given}: {problem}"
    expected = detail["msg"].replace("Input should be", "expected", 1)
    expected = expected.replace("valid tuple", "valid list")
    if detail["type"] == "string_type" and isinstance(given, int | float):
        expected += "; put it in quotes"
    return f"{path}={json.dumps(given, default=str)}: {expected}"


def _raise_if_any(problems: Iterable[str]) -> None:
    text = "\n".join(problems)
    if text:
        raise ConfigError(text)
