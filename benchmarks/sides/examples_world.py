"""What both sides of `training_on_examples` train: a random Llama, a tokenizer of words, and rows
of random words."""

import json
from pathlib import Path

import numpy as np

from benchmarks.harness import sized

VOCABULARY = 8192
HIDDEN = 256
LAYERS = 4
INTERMEDIATE = 768
LONGEST = 1024
ROWS_PER_STEP = {"sft": 32, "rm": 16, "dpo": 16}
PROMPT_WORDS, ANSWER_WORDS = sized((64, 128), (8, 8))  # medians
SPECIAL = ["<pad>", "<turn>", "<end>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ ' <turn> ' if m.role == 'user' else ' <end>' "
    "}}{% endfor %}"
)


def make_models(folder: Path) -> None:
    """Writes `language`, a Llama with random weights in float32, and `reward`, one with a head of
    one number, each with the tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    words = [*SPECIAL, *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL)))]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<turn>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        initializer_range=0.1,  # so large that attention to a wrong token shows in the loss
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        num_labels=1,
    )
    for name, kind in (("language", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_rows(path: Path, kind: str, num_rows: int) -> None:
    """Conversations of a prompt and an answer, or pairs of them. Lengths are log-normal, with
    medians of 64 and 128 words and means of about 80 and 170; a conversation has at most `LONGEST`
    tokens."""
    rng = np.random.default_rng(0)

    def said(role: str, median: int, sigma: float, most: int) -> list[dict[str, str]]:
        num_words = int(np.clip(rng.lognormal(np.log(median), sigma), 2, most))
        words = rng.integers(VOCABULARY - len(SPECIAL), size=num_words)
        return [{"role": role, "content": " ".join(f"w{i}" for i in words)}]

    with path.open("w") as file:
        for _ in range(num_rows):
            row = {"prompt": said("user", PROMPT_WORDS, 0.7, LONGEST // 4)}
            for answer in ("completion",) if kind == "sft" else ("chosen", "rejected"):
                row[answer] = said("assistant", ANSWER_WORDS, 0.8, LONGEST - LONGEST // 4 - 2)
            file.write(json.dumps(row) + "\n")
