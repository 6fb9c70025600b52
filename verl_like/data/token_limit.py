"""Finds texts that have more tokens than a limit by their number of characters, because tokenising
megabytes takes minutes."""

import json
from typing import Any

from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

# Normalizers and splitters that keep all characters but blanks. The effect of a normalizer with a
# pattern depends on the text, so `TokenLimit.normalized` runs the normalizer itself.
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
    """Finds texts whose number of characters shows that they have more than `max_tokens` tokens.

    A byte-pair tokenizer that knows every byte leaves out only blanks. So each other character of
    the normalised text is in a token, and no token has more characters than the longest one of the
    vocabulary:

        tokens >= (characters that are not blank) / (characters of the longest token)

    Other tokenizers may have a token for unknown text, which can stand for any number of
    characters. With such a tokenizer no text counts as too long.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.longest_token: int | None = None
        """The number of characters of the longest token, or None if the tokenizer may have tokens
        for more characters."""
        if self.backend is not None and _keeps_all_characters(self.backend):
            tokens = list(tokenizer.get_vocab())
            tokens += [self.normalized(token) for token in tokenizer.get_added_vocab()]
            self.longest_token = max(len(token) for token in tokens)

    def normalized(self, text: str) -> str:
        """The text as the tokenizer normalises it, but without blanks, for which tokenizers also
        write `▁`."""
        normalizer = self.backend.normalizer
        if normalizer:
            text = normalizer.normalize_str(text)
        words = text.replace("▁", " ").split()
        return "".join(words)

    def is_exceeded(self, text: str) -> bool:
        """Returns True if the text certainly has more tokens than the limit. If it returns False,
        the text may have more tokens or not."""
        if self.longest_token is None:
            return False
        most_characters = self.max_tokens * self.longest_token
        return len(text) > most_characters and len(self.normalized(text)) > most_characters

    def reason(self, text: str) -> str:
        """Returns the part of a message that says why a text has too many tokens."""
        return (
            f"{len(text):,} characters, which no {self.max_tokens} tokens of at most "
            f"{self.longest_token} can be"
        )


def _keeps_all_characters(backend: Any) -> bool:
    """Returns whether a tokenizer is one of byte pairs that knows every byte, and leaves out only
    blanks when it normalises and splits texts."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    vocabulary = backend.get_vocab()
    splitters = _parts(backend.pre_tokenizer, "pretokenizers")
    normalizers = _parts(backend.normalizer, "normalizers")
    types_of_splitters = {part["type"] for part in splitters}
    types_of_normalizers = {part["type"] for part in normalizers}
    if model.byte_fallback:
        knows_all_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    else:
        in_bytes = "ByteLevel" in types_of_splitters | types_of_normalizers
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        knows_all_bytes = in_bytes and vocabulary.keys() >= set(alphabet)
    removes_parts = any(part.get("behavior") == "Removed" for part in splitters)
    keeps_all = types_of_splitters <= _SPLITTERS and types_of_normalizers <= _NORMALIZERS
    return knows_all_bytes and keeps_all and not removes_parts


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or a pre-tokenizer, in the form of `tokenizer.json` and in no
    certain order. There are none if the tokenizer has no such component.

    A sequence has its parts under `key`, and they may be sequences too.
    """
    if component is None:
        return []
    found = []
    to_look_at = [json.loads(component.__getstate__())]
    while to_look_at:
        part = to_look_at.pop()
        if part["type"] == "Sequence":
            to_look_at += part[key]
        else:
            found.append(part)
    return found
