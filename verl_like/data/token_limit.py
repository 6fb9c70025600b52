"""Finds texts that are longer than a limit in tokens by their characters alone: to tokenise
megabytes takes minutes."""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

# What keeps every character but blanks. The normalizer itself is run; a pattern may do something
# else in a part.
_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "Prepend",
    "Replace",
    "Strip",
    "ByteLevel",
}
_SPLITTERS = {
    "ByteLevel",
    "Metaspace",
    "Split",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
}


class TokenLimit:
    """Says of a text that it has more than `max_tokens` tokens, where its characters show it.

    A tokenizer of byte pairs that knows every byte leaves out nothing but blanks. So every other
    character of the normalised text is in a token, and no token has more characters than the
    longest one of the vocabulary:

        tokens >= (characters that are not blank) / (characters of the longest token)

    Of other tokenizers, whose token for unknown text may stand for any number of characters, it
    says nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.longest_token: int | None = None
        """Characters of the longest token; None where that is no bound."""
        if self.backend is not None and _keeps_all_characters(self.backend):
            tokens = [*tokenizer.get_vocab(), *map(self.normalized, tokenizer.get_added_vocab())]
            self.longest_token = max(map(len, tokens))

    def normalized(self, text: str) -> str:
        """What the tokenizer splits, without blanks; `▁` stands for one."""
        normalizer = self.backend.normalizer
        normalized = normalizer.normalize_str(text) if normalizer else text
        return "".join(normalized.replace("▁", " ").split())

    def is_exceeded(self, text: str) -> bool:
        """Whether the text surely has more tokens than the limit. False says nothing."""
        if self.longest_token is None:
            return False
        most_characters = self.max_tokens * self.longest_token
        return len(text) > most_characters and len(self.normalized(text)) > most_characters

    def reason(self, text: str) -> str:
        """Why a text has too many tokens."""
        return (
            f"{len(text):,} characters, which no {self.max_tokens} tokens of at most "
            f"{self.longest_token} can be"
        )


def _keeps_all_characters(backend: Any) -> bool:
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    vocabulary = backend.get_vocab()
    splitters = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    normalizers = list(_parts(backend.normalizer, "normalizers"))
    in_bytes = any(part["type"] == "ByteLevel" for part in (*splitters, *normalizers))
    if model.byte_fallback:
        knows_all_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    else:
        knows_all_bytes = in_bytes and all(
            byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet()
        )
    removes = [
        part
        for part in splitters
        if part["type"] not in _SPLITTERS or part.get("behavior") == "Removed"
    ]
    changes = [part for part in normalizers if part["type"] not in _NORMALIZERS]
    return knows_all_bytes and not removes and not changes


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer is made of, as `tokenizer.json` has it."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), key)


def _flat(part: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part[key]:
        yield from _flat(inner, key)
