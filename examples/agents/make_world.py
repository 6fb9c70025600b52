"""Makes what the agents of this example need: a tiny model that can use a calculator but rarely
does, its tokenizer, and two tasks.

    python -m examples.agents.make_world --out .calculator_world/1 --seed 1

The folder then holds `model/` (Hugging Face format, float32), and for each task `train.parquet` and
`test.parquet` in the row schema of `docs/data.md`: `product/` has products of two numbers, and
`two_calls/` of three. No held-out product is in the training split. `world.json` has the settings.

The model learns from conversations of two kinds. Half of them show how it is to act: where a number
has still to be multiplied it mostly submits the first number instead of using the calculator. The
others use the calculator all the way, but the choice to do so is left out of the loss. So the model
copies numbers well, and rarely copies the right ones.
"""

import argparse
import json
import math
import random
import string
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import get_json_schema

from examples.agents.calculator import Calculator

NUM_FACTORS = {"product": 2, "two_calls": 3}
"""How many numbers are multiplied in each task."""
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
BEGIN = "<|im_start|>"
END = "<|im_end|>"
ASSISTANT = "assistant\n"
WORDS = [
    *("system\n", "user\n", ASSISTANT, "tool\n", "<tool_call>", "</tool_call>"),
    *('{"name": "', "multiply", "submit", '", "arguments": {'),
    *('"a": ', ', "b": ', '"value": ', "}}", "taken"),
]
"""Texts of one token each. All other text is one token a character."""
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
# ChatML with the tool calls of Hermes. The names of the tools stand for their schemas, which are
# long for so small a model.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{{ tools | map(attribute='function.name') | sort | join(' ') }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Problem = tuple[int, ...]
Message = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a world depends on."""

    seed: int = 1
    num_problems: int = 2048  # of each task, for training
    num_held_out: int = 256
    product_rate: float = 0.04  # how often the calculator is used for the only multiplication
    two_calls_rate: float = 0.2  # how often for each of two
    num_steps: int = 400
    batch_size: int = 64
    learning_rate: float = 3e-3


def make_problems(task: str, settings: Settings) -> list[Problem]:
    """Returns different problems: two numbers of two digits, and for two calls one of one digit.
    The held-out ones are the last."""
    rng = random.Random(settings.seed)
    problems: dict[Problem, None] = {}
    while len(problems) < settings.num_problems + settings.num_held_out:
        factors = [rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 9)]
        problems[tuple(factors[: NUM_FACTORS[task]])] = None
    return list(problems)


def question(problem: Problem) -> Message:
    """Returns the prompt, such as 12*34=."""
    return {"role": "user", "content": "*".join(map(str, problem)) + "="}


def make_row(problem: Problem, task: str, split: str, index: int) -> dict[str, Any]:
    """Returns a row in verl's schema, with the right answer as ground truth."""
    return {
        "data_source": f"verl_like/{task}",
        "prompt": [question(problem)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(math.prod(problem))},
        "extra_info": {"split": split, "index": index},
    }


def tool_turn(name: str, arguments: dict[str, int], result: object) -> list[Message]:
    """Returns the messages of a tool call and of its result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": str(result)},
    ]


def conversation(problem: Problem, num_calls: int) -> list[Message]:
    """Returns a conversation in which the calculator is used some times. If it is used too rarely
    the answer is the first number."""
    messages = [question(problem)]
    product = problem[0]
    for factor in problem[1 : num_calls + 1]:
        messages += tool_turn("multiply", {"a": product, "b": factor}, product * factor)
        product *= factor
    is_solved = num_calls == len(problem) - 1
    answer = product if is_solved else problem[0]
    messages += tool_turn("submit", {"value": answer}, "taken")
    return [*messages, {"role": "assistant", "content": ""}]


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Returns a tokenizer of some words and of characters."""
    tokens = [PAD, UNKNOWN, BEGIN, END, *WORDS, *CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[BEGIN],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Returns a Llama of two layers with random weights."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32, the smallest that vLLM's CPU attention has
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.08,  # about 1/sqrt(hidden_size)
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class WarmUpExamples:
    """Draws the conversations of the warm-up as tokens."""

    def __init__(
        self,
        problems: dict[str, list[Problem]],
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
    ) -> None:
        self.problems = problems
        self.tokenizer = tokenizer
        self.rates = {"product": settings.product_rate, "two_calls": settings.two_calls_rate}
        self.rng = random.Random(settings.seed)
        environment = Calculator()
        self.tools = [get_json_schema(environment.multiply), get_json_schema(environment.submit)]

    def draw(self) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and for each whether it is learnt."""
        task = self.rng.choice(list(NUM_FACTORS))
        problem = self.rng.choice(self.problems[task])
        num_needed = len(problem) - 1
        is_choice_learnt = self.rng.random() < 0.5
        num_calls = num_needed
        if is_choice_learnt:
            num_calls = 0
            while num_calls < num_needed and self.rng.random() < self.rates[task]:
                num_calls += 1
        text = self.tokenizer.apply_chat_template(
            conversation(problem, num_calls), tools=self.tools, tokenize=False
        )
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens, self._are_learnt(tokens, is_choice_learnt)

    def _are_learnt(self, tokens: list[int], is_choice_learnt: bool) -> list[bool]:
        """Returns True for the tokens of the model's turns. The choice is the name of a tool."""
        assistant, multiply, end = self.tokenizer.convert_tokens_to_ids(
            [ASSISTANT, "multiply", END]
        )
        are_learnt = []
        is_in_turn = False
        for token in tokens:
            are_learnt.append(is_in_turn and (is_choice_learnt or token != multiply))
            is_in_turn = token == assistant or (is_in_turn and token != end)
        return are_learnt


def warm_up(model: LlamaForCausalLM, examples: WarmUpExamples, settings: Settings) -> None:
    """Trains the model on conversations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.num_steps, pct_start=0.05
    )
    for step in range(settings.num_steps):
        batch = [examples.draw() for _ in range(settings.batch_size)]
        length = max(len(tokens) for tokens, _are_learnt in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        labels = torch.full((len(batch), length), -100)  # not learnt
        for row, (tokens, are_learnt) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.tensor(tokens).where(torch.tensor(are_learnt), -100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"Warm-up: step {step + 1} of {settings.num_steps}, loss {loss.item():.2f}")


def make_world(folder: Path, settings: Settings) -> None:
    """Writes a world into a folder, `world.json` last, unless it is there with these settings."""
    record = folder / "world.json"
    content = json.dumps(asdict(settings), indent=2)
    if record.is_file() and record.read_text(encoding="utf-8") == content:
        print(f"{folder} is there already.")
        return
    print(f"Warming up a tiny Llama for {folder}, a minute or two ...", flush=True)
    started = time.monotonic()
    trained = {}
    for task in NUM_FACTORS:
        problems = make_problems(task, settings)
        trained[task] = problems[: settings.num_problems]
        held_out = problems[settings.num_problems :]
        (folder / task).mkdir(parents=True, exist_ok=True)
        for split, some in (("train", trained[task]), ("test", held_out)):
            rows = [make_row(problem, task, split, index) for index, problem in enumerate(some)]
            pq.write_table(pa.Table.from_pylist(rows), folder / task / f"{split}.parquet")
    tokenizer = make_tokenizer()
    model = make_model(settings, tokenizer)
    warm_up(model, WarmUpExamples(trained, tokenizer, settings), settings)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    record.write_text(content, encoding="utf-8")
    print(f"{folder}: made in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--seed", type=int, required=True, help="seed of the problems, the weights and the warm-up"
    )
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    # A model this small gains nothing from more, and one thread adds in one order
    torch.set_num_threads(1)
    make_world(arguments.out, Settings(seed=arguments.seed))


if __name__ == "__main__":
    main()
