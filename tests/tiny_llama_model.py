"""A random two-layer Llama with a tokenizer of characters."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-="


def save_tiny_llama(
    path: Path,
    *,
    tie: bool = False,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    template: str = _TEMPLATE,
) -> LlamaForCausalLM:
    """A random two-layer Llama and a tokenizer with one token per character: <pad> 0, <eos> 1, then
    the characters.

    The vocabulary of 68 is not a multiple of 64, so engines that pad it are put to the test.
    head_dim is the smallest that vLLM's CPU attention has a kernel for.
    """
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *_CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.normal_(std=0.1)  # a distribution that is neither flat nor certain
    model.save_pretrained(path)
    return model
