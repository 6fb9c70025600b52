"""What the sides of the benchmarks of agents have in common: a tiny model, its tokenizer, prompts,
and the answers of an engine that is scripted.

Tokens are words and characters, tool calls are those of Hermes, and the environment is the
calculator of `examples/agents`.
"""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from examples.agents.calculator import Calculator
from examples.agents.make_world import (
    ASSISTANT,
    Settings,
    make_model,
    make_problems,
    make_row,
    make_tokenizer,
)

CONTEXT = 4096
FACTORS = (12, 34)
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call><|im_end|>'
ANSWER = "408<|im_end|>"


def write_model(folder: Path) -> None:
    """Writes a Llama of two layers with random weights, and its tokenizer. The greedy tokens are
    letters and digits, so that its text has the tokens that were drawn."""
    tokenizer = make_tokenizer()
    model = make_model(Settings(), tokenizer)
    model.config.max_position_embeddings = CONTEXT
    spoken = tokenizer.convert_tokens_to_ids(list(string.ascii_letters + string.digits))
    others = torch.ones(len(tokenizer), dtype=torch.bool)
    others[spoken] = False
    model.lm_head.weight.data[others] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tools() -> list[dict[str, Any]]:
    """The schemas of the calculator's tools, in the order of their names."""
    calculator = Calculator()
    return [get_json_schema(calculator.multiply), get_json_schema(calculator.submit)]


def rows(number: int, num_characters: int = 0, num_turns: int = 0) -> list[dict[str, Any]]:
    """Rows of a dataset: products of two numbers, with so many characters. The tools
    and `num_turns` are for harnesses."""
    problems = make_problems("product", Settings(num_problems=number, num_held_out=0))
    made = [make_row(problem, "product", "train", i) for i, problem in enumerate(problems)]
    for row in made:
        message = row["prompt"][0]
        # The numbers come first: no two prompts have blocks of a prefix cache in common
        message["content"] = message["content"].ljust(num_characters, "=")
        row["extra_info"] |= {"tools": json.dumps(tools()), "num_turns": num_turns}
    return made


class Script:
    """What the scripted engine answers: a tool call in each turn but the last of `num_turns`."""

    def __init__(self, model: str | Path, num_turns: int) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        self.num_turns = num_turns
        self.begins_turn = tokenizer.convert_tokens_to_ids(ASSISTANT)
        self.call = tokenizer.encode(CALL, add_special_tokens=False)
        self.answer = tokenizer.encode(ANSWER, add_special_tokens=False)

    def drawn(self, prompt_ids: Sequence[int]) -> list[int]:
        turn = list(prompt_ids).count(self.begins_turn)
        return self.answer if turn == self.num_turns else self.call
