"""The keys of a schema: their defaults, and what is wrong with keys that it does not have."""

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verl_like.config_model import ConfigModel, Follows
from verl_like.trainer.config.run_config import RunConfig


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


def unknown_keys(
    schema: type[RunConfig],
    tree: Any,
    is_option: Callable[[str, Any], bool],
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Yields what is wrong with keys that neither the schema nor an algorithm declares.

    `is_option(path, block)` says of a key if an algorithm declares it.
    """
    for names, value in values_of(tree):
        path = ".".join(names)
        block: Any = schema
        for i, name in enumerate(names):
            field = block.model_fields.get(name)
            if field is None:
                path_so_far = ".".join(names[: i + 1])
                if not is_option(path_so_far, block):
                    yield f"{path}: there is no such key{suggestion(schema, path, options)}"
                break
            if not _is_model(field.annotation):
                break
            block = field.annotation
        else:
            if value != {} and not str(value).startswith("${"):
                example = next(iter(block.model_fields), "<option>")
                yield f"{path}={json.dumps(value)}: expected keys, such as {path}.{example}"


def values_of(tree: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value of nested dicts with the names on the way to it. An empty dict is a
    value."""
    if isinstance(tree, dict) and tree:
        for name, inner in tree.items():
            yield from values_of(inner, (*names, str(name)))
    else:
        yield names, tree


def suggestion(schema: type[RunConfig], path: str, options: Sequence[str]) -> str:
    """Returns how a message about an unknown key ends: with the key that was probably meant, or
    where all keys are listed.

    `options` has the keys of the chosen algorithms' own options.
    """
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
    names = {last_name(leaf) for leaf in known}
    close = difflib.get_close_matches(last_name(path), names, len(known), cutoff=0.7)
    likeness = {leaf: _likeness(path, leaf) for leaf in known}
    candidates = []
    for leaf in known:
        share_of_words, _ = likeness[leaf]
        if last_name(leaf) in close or share_of_words > 0.9:
            candidates.append(leaf)
    likest = max(candidates, key=likeness.__getitem__, default=None)
    if likest:
        return f"; did you mean {likest}?"
    return f"; {schema.keys_are_listed_by} lists all keys"


def _likeness(path: str, known: str) -> tuple[float, float]:
    """Returns how well each word of the last part of `path` is found in that of `known`, and how
    alike the paths are."""
    words = last_name(path).split("_")
    known_words = last_name(known).split("_")
    found = []
    for word in words:
        ratios = [difflib.SequenceMatcher(None, word, other).ratio() for other in known_words]
        found.append(max(ratios))
    mean = sum(found) / len(found)
    return mean, difflib.SequenceMatcher(None, path, known).ratio()


def last_name(path: str) -> str:
    """Returns the name of a key without its sections."""
    return path.rpartition(".")[2]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigModel)
