"""Makes one checked configuration of any schema from presets, YAML files and command-line
overrides.

Hydra composes and OmegaConf resolves. The models of the schema then decide which keys and values
exist, so an unknown key is refused however it is written (`a.b=1`, `+a.b=1`, `++a.b=1` or YAML).
Then the plugins and the chosen algorithms are imported, whose own options are keys too, and the
rules are checked.
"""

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, get_args

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from verl_like.algorithms.registry import AlgorithmOptions, option_keys
from verl_like.config_model import ConfigModel, Follows, OpenConfigModel
from verl_like.plugins import import_plugins
from verl_like.secret_values import (
    MASK,
    differing_paths,
    has_mask,
    is_secret_name,
    with_masked_urls,
    without_secret_variables,
)
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.presets import RESOLVERS
from verl_like.trainer.config.run_config import RunConfig

Model = TypeVar("Model", bound=ConfigModel)
Schema = TypeVar("Schema", bound=RunConfig)

for resolver in RESOLVERS:
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


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
            registry.may_declare(names[key], _last_name(path))
            for key, registry in schema.algorithm_keys.items()
        )

    problems = list(_unknown_keys(schema, raw, may_be_an_option))
    for key, value in _values_of(raw):
        if value == "???":
            problems.append(f"{'.'.join(key)}: this key has no default, set it")
    _raise_if_any(problems)
    resolved = _resolved(composed)
    _raise_if_any(
        f"{'.'.join(key)}: a secret stands as {MASK} in the record of a run; give the secret itself"
        for key, value in _values_of(resolved)
        if has_mask(value)
    )
    # First without the algorithms' own options, for which plugins are imported
    config = _validated(schema, resolved, schema.base_name)
    options = _algorithm_options(schema, names, config.plugins)
    paths = []
    for declared in options:
        paths += option_keys(declared)
    _raise_if_any(_unknown_keys(schema, raw, lambda path, _: path in paths, paths))
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
        raise _config_error(error) from error


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


def default_tree(model: Any) -> dict[str, Any]:
    """Returns the defaults of the models as plain data: values, the keys that are followed, and
    Hydra's mark for missing."""
    tree: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.default, ConfigModel):
            tree[name] = field.default.model_dump()
        elif _is_model(field.annotation):
            tree[name] = default_tree(field.annotation)
        else:
            tree[name] = field.default
            if field.is_required():
                tree[name] = "???"
            for entry in field.metadata:
                if isinstance(entry, Follows):
                    tree[name] = entry.keys
    return tree


def leaves(model: Any, prefix: str = "") -> Iterator[tuple[str, type[ConfigModel], str]]:
    """Yields every key of the configuration as (full path, model that declares it, field name)."""
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", model, name


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
        raise _config_error(error) from error


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
    """Raises ConfigError for an override of Hydra's own settings, of several values, or with a
    package, which only YAML files of presets have."""
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
        raise ConfigError(f"{line}: there is no such key{_suggestion(schema, key, ())}")
    # The name of a section stands for the section.
    return line if is_of_user and key not in schema.model_fields else None


def _delete(tree: DictConfig, override: Override) -> None:
    """Deletes a key, or what a user has added under it.

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
    """Sets a value. Adds an unknown key, which `_unknown_keys` reports, as Hydra does with ++.

    Raises ConfigError for a value that cannot stand there.
    """
    key = override.key_or_group
    line = override.input_line
    assert line is not None
    try:
        OmegaConf.update(tree, key, _value_of(override, schema), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        shown = _shown_override(line)
        why = ""
        if shown == line:  # else the error may name a secret
            why = f" ({str(error).splitlines()[0]})"
        raise ConfigError(f"{shown}: this value cannot stand there{why}") from error


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


def _unknown_keys(
    schema: type[RunConfig],
    tree: Any,
    is_option: Callable[[str, Any], bool],
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Yields what is wrong with keys that neither the schema nor an algorithm declares.

    `is_option(path, block)` says of a key if an algorithm declares it.
    """
    for names, value in _values_of(tree):
        path = ".".join(names)
        block: Any = schema
        for i, name in enumerate(names):
            field = block.model_fields.get(name)
            if field is None:
                path_so_far = ".".join(names[: i + 1])
                if not is_option(path_so_far, block):
                    yield f"{path}: there is no such key{_suggestion(schema, path, options)}"
                break
            if not _is_model(field.annotation):
                break
            block = field.annotation
        else:
            if value != {} and not str(value).startswith("${"):
                example = next(iter(block.model_fields), "<option>")
                yield f"{path}={json.dumps(value)}: expected keys, such as {path}.{example}"


def _values_of(tree: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value of nested dicts with the names on the way to it. An empty dict is a
    value."""
    if isinstance(tree, dict) and tree:
        for name, inner in tree.items():
            yield from _values_of(inner, (*names, str(name)))
    else:
        yield names, tree


def _suggestion(schema: type[RunConfig], path: str, options: Sequence[str]) -> str:
    if path in schema.replaced_keys:
        return f"; set {schema.replaced_keys[path]}, which replaces it"
    for key, registry in schema.algorithm_keys.items():
        name = registry.name_with_option(path)
        if name:
            return (
                f"; it is an option of the {registry.kind} {name}: set {key}={name}, or remove "
                "the option"
            )
    known = list(schema.presets)
    known += [leaf for leaf, _, _ in leaves(schema)]
    known += options
    # By the last part of their names, because keys of one section share all the others.
    names = {_last_name(leaf) for leaf in known}
    close = difflib.get_close_matches(_last_name(path), names, len(known), cutoff=0.7)
    likeness = {leaf: _likeness(path, leaf) for leaf in known}
    candidates = []
    for leaf in known:
        share_of_words, _ = likeness[leaf]
        if _last_name(leaf) in close or share_of_words > 0.9:
            candidates.append(leaf)
    likest = max(candidates, key=likeness.__getitem__, default=None)
    if likest:
        return f"; did you mean {likest}?"
    return f"; {schema.keys_are_listed_by} lists all keys"


def _likeness(path: str, known: str) -> tuple[float, float]:
    """Returns how well each word of the last part of `path` is found in that of `known`, and how
    alike the paths are."""
    words = _last_name(path).split("_")
    known_words = _last_name(known).split("_")
    found = []
    for word in words:
        ratios = [difflib.SequenceMatcher(None, word, other).ratio() for other in known_words]
        found.append(max(ratios))
    mean = sum(found) / len(found)
    return mean, difflib.SequenceMatcher(None, path, known).ratio()


def _last_name(path: str) -> str:
    return path.rpartition(".")[2]


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


def _config_error(error: Exception) -> ConfigError:
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


def _raise_if_any(problems: Iterable[str]) -> None:
    text = "\n".join(problems)
    if text:
        raise ConfigError(text)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigModel)
