"""Which values of a configuration are secret, and how they are shown.

A value is secret if its key, or the environment variable that it came from, contains one of
`WORDS`. In a URL only the user information is secret. Where a run shows or keeps a secret, `***`
takes its place.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

MASK = "***"
WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
NAMES_OF_NO_SECRETS = (
    "prompt_key",
    "reward_fn_key",
    "gdpo_reward_keys",
    "tokenizer_path",
    "max_num_batched_tokens",
    "max_token_len_per_gpu",
    "ppo_max_token_len_per_gpu",
    "forward_max_token_len_per_gpu",
    "log_prob_max_token_len_per_gpu",
)
"""Keys of the library that contain one of the words, but are no secrets."""
BLOCK_OF_SECRET_NUMBERS = "reward_kwargs"
"""The block in which a number can be a secret. Elsewhere no number is one, for instance
`override_config.pad_token_id`."""
_SHORTEST = 6
"""Shorter secrets are not masked in messages, because such a text may be there by chance."""
_USER_INFORMATION = re.compile(r"(?<=://)([^/?#\s@]*(?:@[^/?#\s@]*)*)@")
_SECRET_VARIABLE = re.compile(
    rf"\$\{{\s*oc\.env\s*:[^}},]*(?:{'|'.join(WORDS)})[^}}]*\}}", re.IGNORECASE
)

Path = tuple[str, ...]


def is_secret_name(name: str) -> bool:
    """Returns whether a key, or an environment variable, has the name of a secret."""
    if name in NAMES_OF_NO_SECRETS:
        return False
    upper_name = name.upper()
    return any(word in upper_name for word in WORDS)


def with_masked_urls(text: str) -> str:
    """The text with the user information of each URL in it masked."""
    return _USER_INFORMATION.sub(f"{MASK}@", text)


def without_secret_variables(tree: Any) -> Any:
    """The unresolved configuration with another text in place of each `${oc.env:NAME}` whose NAME
    is that of a secret."""
    if isinstance(tree, Mapping):
        return {name: without_secret_variables(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secret_variables(value) for value in tree]
    if isinstance(tree, str):
        return _SECRET_VARIABLE.sub("of_a_secret_variable", tree)
    return tree


def differing_paths(tree: Any, other: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the path of each value in which two configurations differ. A list counts as one
    value."""
    if isinstance(tree, Mapping) and isinstance(other, Mapping):
        for name in {**tree, **other}:
            path_of_value = (*path, str(name))
            yield from differing_paths(tree.get(name), other.get(name), path_of_value)
    elif tree != other:
        yield path


def masked(tree: Any, secret_paths: Collection[Path] = (), path: Path = ()) -> Any:
    """The configuration with its secrets masked. Values at `secret_paths` are secret whatever their
    keys are. `path` is where `tree` is in the whole configuration."""
    if isinstance(tree, Mapping):
        return {
            name: masked(value, secret_paths, (*path, str(name))) for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [masked(value, secret_paths, path) for value in tree]
    if _is_secret(tree, secret_paths, path):
        return MASK
    if isinstance(tree, str):
        return with_masked_urls(tree)
    return tree


def has_mask(tree: Any) -> bool:
    """Returns whether a value, or one inside it, is masked."""
    if isinstance(tree, Mapping):
        return any(map(has_mask, tree.values()))
    if isinstance(tree, list | tuple):
        return any(map(has_mask, tree))
    if isinstance(tree, str):
        return tree == MASK or f"://{MASK}@" in tree
    return False


def hidden_as(shown: Any, tree: Any) -> Any:
    """The configuration `tree` with a mask wherever `shown` has one, so that the two are compared
    without their secrets."""
    if isinstance(shown, Mapping) and isinstance(tree, Mapping):
        return {name: hidden_as(shown.get(name), value) for name, value in tree.items()}
    are_lists = isinstance(shown, list | tuple) and isinstance(tree, list | tuple)
    if are_lists and len(shown) == len(tree):
        return [hidden_as(own, value) for own, value in zip(shown, tree, strict=True)]
    return MASK if shown == MASK else tree


@dataclass(frozen=True)
class Redaction:
    """Masks secrets in messages. It is called with a text and returns the masked text."""

    texts: tuple[str, ...]
    """The secrets, the longest first, because a secret may contain a shorter one."""

    @classmethod
    def of(cls, tree: Any, secret_paths: Collection[Path] = ()) -> Self:
        """Masks the secrets of a configuration, and of the environment variables of this
        process."""
        variables = [value for name, value in os.environ.items() if is_secret_name(name)]
        texts = {*_secret_texts(tree, secret_paths, ()), *variables}
        long_enough = [text for text in texts if len(text) >= _SHORTEST]
        longest_first = sorted(long_enough, key=len, reverse=True)
        return cls(tuple(longest_first))

    def __call__(self, text: str) -> str:
        for secret in self.texts:
            text = text.replace(secret, MASK)
        return with_masked_urls(text)


def _is_secret(value: Any, secret_paths: Collection[Path], path: Path) -> bool:
    """Returns whether the value at `path` is secret."""
    if value is None or isinstance(value, bool):
        return False
    if any(path[: len(secret)] == secret for secret in secret_paths):
        return True
    if isinstance(value, int | float) and BLOCK_OF_SECRET_NUMBERS not in path:
        return False
    return any(map(is_secret_name, path))


def _secret_texts(tree: Any, secret_paths: Collection[Path], path: Path) -> Iterator[str]:
    """Yields the secrets of a configuration as texts. Of a URL that is no secret itself these are
    its user information, and the password in that once more by itself."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            path_of_value = (*path, str(name))
            yield from _secret_texts(value, secret_paths, path_of_value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _secret_texts(value, secret_paths, path)
    elif _is_secret(tree, secret_paths, path):
        yield str(tree)
    elif isinstance(tree, str):
        for user_information in _USER_INFORMATION.findall(tree):
            _user, _colon, password = user_information.partition(":")
            yield user_information
            yield password
