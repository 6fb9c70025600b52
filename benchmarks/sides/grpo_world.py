"""What both sides of `grpo_step`, `grpo_step_experts` and `grpo_reward_curve` train on: a random
Llama or mixture of experts, a tokenizer of words, prompts, rewards and forced response lengths."""

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.harness import sized

END = "<end>"
NUM_PROMPTS = 8
SAMPLES_PER_PROMPT = 8
PROMPT_LENGTH = 32
VOCABULARY = 4096
LONGEST = sized(128, 16)
NUM_SAMPLES = NUM_PROMPTS * SAMPLES_PER_PROMPT
MAX_OVER_MEAN = 4
STEPS_PER_LAW = sized(10, 2)
COPY_LENGTH = 8


def words(vocab_size: int) -> list[str]:
    return [f"w{i}" for i in range(vocab_size - 1)]


OF_TOKEN = 2
"""The experts that compute a token, which together are as large as a dense block."""


def make_model(
    folder: Path,
    *,
    vocab_size: int,
    hidden: int,
    layers: int,
    intermediate: int,
    positions: int,
    num_experts: int = 0,
) -> int:
    """Writes a Llama, or with experts a Qwen3-MoE, with random weights in float32 and heads of 64,
    and its tokenizer; returns the parameters that compute a token."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    experts = {
        "moe_intermediate_size": intermediate // OF_TOKEN,
        "num_experts": num_experts,
        "num_experts_per_tok": OF_TOKEN,
    }
    config = Qwen3MoeConfig(**sizes, **experts) if num_experts else LlamaConfig(**sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    save(model, folder, vocab_size)
    num_idle = 0
    for parameter in model.parameters():
        if parameter.ndim == 3:  # the experts of a layer
            num_idle += parameter[OF_TOKEN:].numel()
    return model.num_parameters() - num_idle


def save(model: Any, folder: Path, vocab_size: int) -> None:
    """Writes a model and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {END: 0} | {word: i for i, word in enumerate(words(vocab_size), start=1)}
    backend = Tokenizer(models.WordLevel(table, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, unk_token=END
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def speed_prompts() -> list[str]:
    """Prompts of random words."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words(VOCABULARY), PROMPT_LENGTH)) for _ in range(NUM_PROMPTS)]


def copy_prompts(vocab_size: int) -> list[str]:
    """A prompt for each word: the word four times."""
    return [" ".join([word] * 4) for word in words(vocab_size)]


def write_prompts(path: Path, prompts: list[str]) -> None:
    """The prompts as a parquet file in verl's row schema; the ground truth is the prompt's last
    word."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": prompt.split()[-1]},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def parity(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """Whether the number of the first word is even: a reward that knows nothing of the length."""
    first = (solution_str.split() or ["w1"])[0]
    return float(int(first[1:]) % 2 == 0)


def copies(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """The share of the response's words that are the prompt's word."""
    return solution_str.split().count(ground_truth) / COPY_LENGTH


def forced_lengths(num_samples: int, longest: int, max_over_mean: float) -> list[int]:
    """Quantiles of a log-normal law, scaled so that the longest is `longest` and `max_over_mean`
    times the mean."""
    z = np.array([NormalDist().inv_cdf((i + 0.5) / num_samples) for i in range(num_samples)])
    low = 0.0
    high = 3.0
    for _ in range(60):
        sigma = (low + high) / 2
        law = np.exp(sigma * z)
        low, high = (sigma, high) if law.max() / law.mean() < max_over_mean else (low, sigma)
    return [max(2, math.floor(longest * value / law.max() + 0.5)) for value in law]


def lengths_of_step(step: int) -> list[int]:
    """Response lengths of a step of `grpo_step`: first full ones, then long-tailed ones in another
    order each step."""
    if step < STEPS_PER_LAW:
        return [LONGEST] * NUM_SAMPLES
    lengths = forced_lengths(NUM_SAMPLES, LONGEST, MAX_OVER_MEAN)
    return [lengths[i] for i in np.random.default_rng(step).permutation(NUM_SAMPLES)]
