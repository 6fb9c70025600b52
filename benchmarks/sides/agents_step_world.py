"""What both sides of `agents_step` train on: a model that thinks for a while in each turn and then
calls the calculator, its tokenizer, and prompts.

The next token depends on the last one alone, since the projections behind attention and the MLP are
zero. They are computed as any others are. So the law of the lengths is known: after each thought
comes another with a certain probability, and the tool's call is always the same.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import sized
from benchmarks.sides import agents_world
from benchmarks.sides.grpo_world import SAMPLES_PER_PROMPT
from examples.agents.make_world import ASSISTANT, END, make_tokenizer

NUM_PROMPTS = sized(8, 2)
NUM_SAMPLES = NUM_PROMPTS * SAMPLES_PER_PROMPT
NUM_TURNS = 3
PROMPT_LENGTH = 32
RESPONSE_LENGTH = sized(384, 128)
MEAN_THOUGHTS = sized(24, 4)
"""Tokens of a turn before its call: a geometric law."""
THOUGHT = "x"
CALL = [
    *("<tool_call>", '{"name": "', "multiply", '", "arguments": {'),
    *('"a": ', "7", ', "b": ', "8", "}}", "</tool_call>", END),
]
HIDDEN = 256
NEVER = -40.0
"""The logit of a token that is not drawn."""


def write_model(folder: Path) -> int:
    """Writes the model in float32, with heads of 64, and its tokenizer; returns its parameters."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64,
        max_position_embeddings=PROMPT_LENGTH + RESPONSE_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    # The final norm makes the one in each embedding sqrt(HIDDEN).
    model.model.embed_tokens.weight.data = torch.eye(len(tokenizer), HIDDEN)
    table = logits(tokenizer) / math.sqrt(HIDDEN)
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[:, : len(tokenizer)] = table.T
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def logits(tokenizer: Any) -> torch.Tensor:
    """The logits of the next token (columns) behind each token (rows)."""
    table = torch.full((len(tokenizer), len(tokenizer)), NEVER)
    chain = tokenizer.convert_tokens_to_ids([ASSISTANT, THOUGHT, *CALL])
    for last, following in itertools.pairwise(chain):
        table[last, following] = 0.0
    thought = chain[1]
    table[thought, thought] = math.log(MEAN_THOUGHTS - 1)
    return table


def num_inserted(tokenizer: Any) -> int:
    """Returns how many tokens a call of the tool inserts: its result, and what the template writes
    around it."""
    function = {"name": "multiply", "arguments": {"a": 7, "b": 8}}
    call = {"type": "function", "function": function}
    messages = [
        {"role": "user", "content": "7*8="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    result = {"role": "tool", "name": "multiply", "content": "56"}
    before = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(
        [*messages, result], tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith(before)
    return len(tokenizer.encode(prompt[len(before) :], add_special_tokens=False))


def write_prompts(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(agents_world.rows(NUM_PROMPTS)), path)
