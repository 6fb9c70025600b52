"""Which values of a configuration are secret, and how they are shown.

A value is secret if its key, or the environment variable that it came from, contains one of
`WORDS`; of a URL with user information, that part alone is. Where a run shows or keeps a secret,
`***` stands in its place.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

MASK = "***"
WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
NAMES_OF_NO_SECRETS = (
    *(
        "prompt_key",
        "reward_fn_key",
        "gdpo_reward_keys",
        "tokenizer_path",
        "max_num_batched_tokens",
    ),
    *("max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
    *("forward_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"),
)
"""Our own keys that contain one of the words."""
BLOCK_OF_SECRET_NUMBERS = "reward_kwargs"
"""Elsewhere a number, such as `override_config.pad_token_id`, is no secret."""
_SHORTEST = 6
"""A shorter text may stand in a message by chance, and stays there."""
_USER_INFORMATION = re.compile(r"(?<=://)([^/?#\s@]*(?:@[^/?#\s@]*)*)@")
_SECRET_VARIABLE = re.compile(
    rf"\$\{{\s*oc\.env\s*:[^}},]*(?:{'|'.join(WORDS)})[^}}]*\}}", re.IGNORECASE
)

Path = tuple[str, ...]


def is_secret_name(name: str) -> bool:
    """Whether a key, or an environment variable, has the name of a secret."""
    return name not in NAMES_OF_NO_SECRETS and any(word in name.upper() for word in WORDS)


def with_masked_urls(text: str) -> str:
    """The text with the user information of each URL in it masked."""
    return _USER_INFORMATION.sub(f"{MASK}@", text)


def without_secret_variables(tree: Any) -> Any:
    """An unresolved configuration in which `${oc.env:NAME}` with the name of a secret is another
    text."""
    if isinstance(tree, Mapping):
        return {name: without_secret_variables(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secret_variables(value) for value in tree]
    return _SECRET_VARIABLE.sub("of_a_secret_variable", tree) if isinstance(tree, str) else tree


def differing_paths(tree: Any, other: Any, path: Path = ()) -> Iterator[Path]:
    """Where two configurations differ; a list differs as a whole."""
    if isinstance(tree, Mapping) and isinstance(other, Mapping):
        for name in {**tree, **other}:
            yield from differing_paths(tree.get(name), other.get(name), (*path, str(name)))
    elif tree != other:
        yield path


def masked(tree: Any, secret_paths: Collection[Path] = (), path: Path = ()) -> Any:
    """The configuration with its secrets masked; those at `secret_paths` are secret whatever their
    name."""
    if isinstance(tree, Mapping):
        return {
            name: masked(value, secret_paths, (*path, str(name))) for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [masked(value, secret_paths, path) for value in tree]
    if _is_secret(tree, secret_paths, path):
        return MASK
    return with_masked_urls(tree) if isinstance(tree, str) else tree


def has_mask(tree: Any) -> bool:
    """Whether a value, or one within it, is what a run shows of a secret, and not the secret."""
    if isinstance(tree, Mapping):
        return any(map(has_mask, tree.values()))
    if isinstance(tree, list | tuple):
        return any(map(has_mask, tree))
    return isinstance(tree, str) and (tree == MASK or f"://{MASK}@" in tree)


def hidden_as(shown: Any, tree: Any) -> Any:
    """The tree with a mask in each place where `shown` has one, so that two configurations compare
    without secrets."""
    if isinstance(shown, Mapping) and isinstance(tree, Mapping):
        return {name: hidden_as(shown.get(name), value) for name, value in tree.items()}
    if (
        isinstance(shown, list | tuple)
        and isinstance(tree, list | tuple)
        and len(shown) == len(tree)
    ):
        return [hidden_as(own, value) for own, value in zip(shown, tree, strict=True)]
    return MASK if isinstance(shown, str) and shown == MASK else tree


@dataclass(frozen=True)
class Redaction:
    """Masks secrets in messages: those of a configuration, and of environment variables with the
    name of a secret."""

    texts: tuple[str, ...]
    """What is masked, the longest first."""

    @classmethod
    def of(cls, tree: Any, secret_paths: Collection[Path] = ()) -> Self:
        """The secrets of a configuration and of this process's environment."""
        texts = {value for name, value in os.environ.items() if is_secret_name(name)}
        texts |= set(_secret_texts(tree, secret_paths, ()))
        return cls(
            tuple(sorted((text for text in texts if len(text) >= _SHORTEST), key=len, reverse=True))
        )

    def __call__(self, text: str) -> str:
        for secret in self.texts:
            text = text.replace(secret, MASK)
        return with_masked_urls(text)


def _is_secret(value: Any, secret_paths: Collection[Path], path: Path) -> bool:
    if value is None or isinstance(value, bool):
        return False
    if any(path[: len(secret)] == secret for secret in secret_paths):
        return True
    is_number_elsewhere = isinstance(value, int | float) and BLOCK_OF_SECRET_NUMBERS not in path
    return any(map(is_secret_name, path)) and not is_number_elsewhere


def _secret_texts(tree: Any, secret_paths: Collection[Path], path: Path) -> Iterator[str]:
    """The texts by which the secrets of a configuration are known; of user information also the
    password alone."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _secret_texts(value, secret_paths, (*path, str(name)))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _secret_texts(value, secret_paths, path)
    elif _is_secret(tree, secret_paths, path):
        yield str(tree)
    elif isinstance(tree, str):
        for user_information in _USER_INFORMATION.findall(tree):
            yield user_information
            yield user_information.partition(":")[2]
