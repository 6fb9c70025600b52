"""Texts that are too long by their characters alone are found before the tokenizer reads them, and
no others."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_like.data import PromptDataset
from verl_like.data.conversations import ConversationDataset
from verl_like.data.token_limit import TokenLimit

WORDS = ["banana", "bandana", "ananas", "cabana", "na\u00efve", "\u4f60\u597d", "\ufb03"]
BYTES = pre_tokenizers.ByteLevel.alphabet()
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def byte_pairs(*, normalizer: Any = None, splitters: list[Any] | None = None) -> Tokenizer:
    """A byte-level tokenizer that merges the words above."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*(splitters or []), pre_tokenizers.ByteLevel(False)]
    )
    if normalizer:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=BYTES, show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return backend


def with_fallback() -> Tokenizer:
    """A tokenizer as of SentencePiece: characters, and bytes for those that it does not know."""
    tokens = ["\u2581", "a", "n", "an", "ana", "\u2581\u2581\u2581\u2581"]
    vocabulary = {
        token: number
        for number, token in enumerate([*tokens, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    merges = [("a", "n"), ("an", "a")]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return backend


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    # It takes all blanks beside it.
    tokenizer.add_tokens([AddedToken("<turn>", lstrip=True, rstrip=True, special=True)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZERS = {
    "bytes": lambda: byte_pairs(),
    "normalised": lambda: byte_pairs(normalizer=normalizers.NFKC()),
    "digits": lambda: byte_pairs(splitters=[pre_tokenizers.Digits(individual_digits=True)]),
    "fallback": with_fallback,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_that_fits_is_called_too_long(name: str):
    tokenizer = wrapped(TOKENIZERS[name]())
    longest = TokenLimit(tokenizer, 1).longest_token
    draw = random.Random(7)
    pieces = [
        *WORDS,
        " ",
        "\n",
        " " * 300,
        "<turn>",
        "<eos>",
        "e\u0301",
        "\ufdfa",
        "7",
        "\U0001f600",
    ]
    num_found = 0
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 60)))
        num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert not TokenLimit(tokenizer, num_tokens).is_exceeded(text), repr(text)
        num_found += TokenLimit(tokenizer, num_tokens // (2 * longest)).is_exceeded(text)
    assert num_found > 30


def test_the_bound_is_the_longest_token_to_the_character():
    tokenizer = wrapped(byte_pairs())
    longest = max(tokenizer.get_vocab(), key=len)
    assert TokenLimit(tokenizer, 5).longest_token == len(longest)
    assert not TokenLimit(tokenizer, 5).is_exceeded("x" * (5 * len(longest)))
    assert TokenLimit(tokenizer, 5).is_exceeded("x" * (5 * len(longest) + 1))
    assert not TokenLimit(tokenizer, 5).is_exceeded("x" * (5 * len(longest)) + " " * 999)
    assert not TokenLimit(tokenizer, 5).is_exceeded(" ".join("x" * (5 * len(longest))))


def test_a_tokenizer_that_may_leave_characters_out_or_join_them_has_no_bound():
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    removing = byte_pairs(splitters=[pre_tokenizers.Split("x", "removed")])
    few_bytes = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    few_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    changing = byte_pairs(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()]))
    for backend in (words, removing, few_bytes, changing):
        limit = TokenLimit(wrapped(backend), 2)
        assert limit.longest_token is None and not limit.is_exceeded("x" * 10_000)


KEEPING = {
    "NFC": (),
    "NFD": (),
    "NFKC": (),
    "NFKD": (),
    "Lowercase": (),
    "StripAccents": (),
    "ByteLevel": (),
}
KEEPING |= {"Prepend": ("x",), "Replace": ("x", "yy"), "Strip": ()}


@pytest.mark.parametrize("name", KEEPING)
def test_a_normalizer_that_keeps_characters_leaves_a_bound(name: str):
    normalizer = getattr(normalizers, name)(*KEEPING[name])
    assert TokenLimit(wrapped(byte_pairs(normalizer=normalizer)), 2).longest_token


def no_tokenizing(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Collects the texts that the tokenizer reads."""
    read: list[str] = []
    encode = type(tokenizer)._encode_plus

    def spy(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        read.extend([text] if isinstance(text, str) else text)
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", spy)
    return read


def rows(folder: Path) -> str:
    texts = ["banana", "x" * 100_000, "cabana"]
    fields = {"data_source": "a", "reward_model": {"ground_truth": "b"}}
    lines = [json.dumps(fields | {"prompt": [{"role": "user", "content": text}]}) for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder / "rows.jsonl")


def test_a_prompt_that_is_too_long_is_refused_or_left_out_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = wrapped(byte_pairs())
    read = no_tokenizing(monkeypatch, tokenizer)
    with pytest.raises(ValueError) as error:
        PromptDataset(rows(tmp_path), tokenizer, max_prompt_length=64)
    assert (
        "rows.jsonl, row 1: the prompt is longer than data.max_prompt_length=64: it has 100,000 "
        "characters" in str(error.value)
    )
    assert "data.filter_overlong_prompts=True" in str(error.value) and not read
    dataset = PromptDataset(
        rows(tmp_path), tokenizer, max_prompt_length=64, filter_overlong_prompts=True
    )
    assert [row["raw_prompt"][0]["content"] for row in dataset] == read == ["banana", "cabana"]
    assert (dataset.num_filtered, dataset.num_truncated) == (1, 0)
    cut = PromptDataset(rows(tmp_path), tokenizer, max_prompt_length=64, truncation="right")
    assert len(cut) == 3 and len(cut[1]["input_ids"]) == 64 and cut.num_truncated == 1


@pytest.mark.parametrize("field", ["text", "messages"])
def test_a_conversation_that_is_too_long_is_refused_or_left_out_before_it_is_tokenised(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = wrapped(byte_pairs())
    long = "x" * 100_000
    chat = [{"role": "user", "content": "banana"}, {"role": "assistant", "content": long}]
    records = [{"text": "cabana " * 3}, {"text": long} if field == "text" else {"messages": chat}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
    files = [str(tmp_path / "rows.jsonl")]
    read = no_tokenizing(monkeypatch, tokenizer)
    with pytest.raises(
        ValueError, match=r"rows.jsonl, row 1: .* longer than data.max_length=64: it has 100,0"
    ):
        ConversationDataset(files, tokenizer, max_length=64)
    dataset = ConversationDataset(files, tokenizer, max_length=64, overlong="drop")
    assert len(dataset) == dataset.num_dropped == 1 and max(map(len, read)) < 100
    cut = ConversationDataset(files, tokenizer, max_length=64, overlong="truncate")
    assert cut.num_truncated == 1 and cut.longest[0] == 64


def test_of_a_tokenizer_that_is_not_of_the_library_nothing_is_said():
    class Words:
        """Has no `backend_tokenizer`."""

    assert not TokenLimit(Words(), 2).is_exceeded("a" * 10_000)
