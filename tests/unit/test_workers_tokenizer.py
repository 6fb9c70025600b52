"""The tokenizer is what its `tokenizer.json` says, whatever class its configuration names, also in
an export."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules
from verl_like.trainer.supervised.run_supervised import check_inputs
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.models.pretrained import check_tokenizer, load_tokenizer, save_settings

TEXT = "hello world\nhow are you"
BEGIN, END = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}User: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# What DeepSeek-LLM's tokenizer.json splits by, before it goes to bytes.
SPLITS = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]


def write_folder(folder: Path, tokenizer: Tokenizer, **configuration: object) -> TrainedModelConfig:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, **configuration})
    )
    LlamaConfig(vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    return TrainedModelConfig(path=str(folder))


@pytest.fixture
def byte_level(tmp_path: Path) -> TrainedModelConfig:
    """A byte-level tokenizer that calls itself Llama's, with the parts and the labels of
    DeepSeek-LLM's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT, "are the 12 boxes red?"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(BEGIN, special=True), AddedToken(END, special=True)])
    end = {
        "__type": "AddedToken",
        "content": END,
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
    }
    return write_folder(
        tmp_path,
        tokenizer,
        tokenizer_class="LlamaTokenizerFast",
        add_bos_token=True,
        add_eos_token=False,
        bos_token=end | {"content": BEGIN},
        eos_token=end,
        pad_token=end,
        unk_token=None,
        legacy=True,
        clean_up_tokenization_spaces=False,
        sp_model_kwargs={},
    )


def file_of(config: TrainedModelConfig) -> Tokenizer:
    return Tokenizer.from_file(f"{config.path}/tokenizer.json")


def test_a_byte_level_tokenizer_that_is_labelled_llama_keeps_its_spaces(
    byte_level: TrainedModelConfig,
) -> None:
    tokenizer = load_tokenizer(byte_level)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == file_of(byte_level).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert (
        special == [BEGIN, END, END, None]
        and len(tokenizer) == file_of(byte_level).get_vocab_size()
    )
    messages = [{"role": "user", "content": TEXT}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == f"{BEGIN}User: {TEXT}\n\nAssistant:"
    check_tokenizer(tokenizer, byte_level, [TEXT, rendered], key="model")


def test_the_exported_tokenizer_is_that_of_the_file_for_every_reader(
    byte_level: TrainedModelConfig, tmp_path: Path
) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=302,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    exported = tmp_path / "exported"
    save_settings(model, load_tokenizer(byte_level), torch.float32, str(exported))
    ids = file_of(byte_level).encode(TEXT, add_special_tokens=False).ids
    for reader in (
        AutoTokenizer.from_pretrained(exported),
        load_tokenizer(TrainedModelConfig(path=str(exported))),
    ):
        assert reader(TEXT, add_special_tokens=False)["input_ids"] == ids
        assert reader.decode(ids) == TEXT
        assert reader.chat_template == TEMPLATE and reader.eos_token == END


def test_a_tokenizer_that_reads_otherwise_than_its_file_is_refused(
    byte_level: TrainedModelConfig,
) -> None:
    rebuilt = AutoTokenizer.from_pretrained(byte_level.path)
    rebuilt.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    rebuilt.backend_tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(
        ValueError,
        match=r"as the run reads it .*tokenizer.json: 'hello world\\nhow are you' becomes",
    ):
        check_tokenizer(rebuilt, byte_level, [TEXT], key="model")
    no_decoder = load_tokenizer(byte_level)
    no_decoder.backend_tokenizer.decoder = decoders.Fuse()
    with pytest.raises(ValueError, match=r"decoded as 'helloĠworldĊ.* not 'hello world"):
        check_tokenizer(no_decoder, byte_level, [TEXT], key="model")


def test_a_model_type_whose_readers_rebuild_the_exported_tokenizer_is_refused(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(models.BPE())
    # Qwen2Tokenizer splits them one by one
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=258, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["123"] * 20, trainer)
    config = write_folder(tmp_path, tokenizer, eos_token="z")
    check_tokenizer(load_tokenizer(config), config, ["123"], key="model")
    Qwen2Config(vocab_size=258).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"as an export of it reads it \(Qwen2Tokenizer\), is not that of"
    ):
        check_tokenizer(load_tokenizer(config), config, ["123"], key="model")
    tiny = Qwen2Config(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    Qwen2ForCausalLM(tiny).save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a123"}')
    own = [
        f"data.train_files={tmp_path}/rows.jsonl",
        f"model.path={tmp_path}",
        "trainer.device=cpu",
    ]
    settings = load_config(SFTConfig, broken_supervised_rules, [*own, "data.train_batch_size=1"])
    with pytest.raises(
        ValueError, match=r"the tokenizer of model, as an export of it .*set model\.tokenizer_path"
    ):
        check_inputs(settings, None)


def test_a_tokenizer_of_sentencepiece_keeps_its_own_spaces(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd"]
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = write_folder(
        tmp_path, tokenizer, tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>"
    )
    loaded = load_tokenizer(config)
    ids = loaded("hello\n world", add_special_tokens=False)["input_ids"]
    assert ids == [words.index(piece) for piece in ["▁", *"hello", "<0x0A>", "▁", *"world"]]
    assert loaded.decode(ids) == "hello\n world"
    check_tokenizer(loaded, config, ["hello\n world"], key="model")


def test_a_tokenizer_without_tokenizer_json_is_left_to_its_class(tmp_path: Path) -> None:
    pieces = [*pre_tokenizers.ByteLevel.alphabet(), "he", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    LlamaConfig().save_pretrained(tmp_path)
    config = TrainedModelConfig(path=str(tmp_path))
    tokenizer = load_tokenizer(config)
    assert tokenizer.tokenize("hello he") == ["he", "l", "l", "o", "Ġ", "he"]
    check_tokenizer(tokenizer, config, ["hello"], key="model")
