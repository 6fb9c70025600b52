"""Makes a world small enough for a laptop: a tiny DeepSeek-architecture model, its tokenizer and
arithmetic data.

    python examples/split_placement/make_toy_world.py --out .toy_world --seed 1

The folder then holds `model/` (Hugging Face format, float32), `train.parquet` and `test.parquet`
(sums of two two-digit numbers in the row schema of `docs/data.md`), `answers.parquet` (what the
warm-up learns from) and `world.json` (the settings and what the warm-up reached). Held-out sums
occur in neither order in the training split, so neither the warm-up nor PPO sees them.

The warm-up is a run of `main_sft` (config/warm_up.yaml). In its answers about two carries of three
are left out on purpose: more than half of them are wrong. The model learns the digits and the
format, and its most likely answer is right where there is nothing to carry. From PPO's reward it
then learns to carry.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
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
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

DATA_SOURCE = "verl_like/arithmetic"
PAD = "<|pad|>"
BEGIN = "<|begin_of_sentence|>"
END = "<|end_of_sentence|>"
UNKNOWN = "<|unknown|>"
USER = "<|User|>"
ASSISTANT = "<|Assistant|>"
VOCABULARY = [PAD, BEGIN, END, UNKNOWN, USER, ASSISTANT, *"0123456789+="]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{{% if message.role == 'user' %}}{USER}{{{{ message.content }}}}"
    f"{{% elif message.role == 'assistant' %}}{ASSISTANT}{{{{ message.content }}}}{{{{ eos_token "
    f"}}}}"
    "{% else %}{{ raise_exception('roles are user and assistant, not ' + message.role) }}{% endif "
    "%}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
MAX_ANSWER_LENGTH = 4  # tokens: three digits and the end of the sentence
HEAD_DIM = 32  # the smallest that vLLM's CPU attention has

Problem = tuple[int, int]


@dataclass(frozen=True)
class Settings:
    """What a toy world depends on; the same settings give the same files."""

    seed: int = 1
    num_held_out: int = 256
    forgotten_carries: float = 0.65  # probability that a carry is left out
    hidden_size: int = 128
    num_layers: int = 2
    num_experts: int = (
        0  # of each layer, two of which compute a token; 0 is a model without experts
    )
    num_answers: int = 25_600  # of the warm-up
    warm_up_epochs: int = 4
    warm_up_batch_size: int = 256
    learning_rate: float = 2e-3


def split_problems(num_held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """All sums of two two-digit numbers as (train, held-out); no held-out sum is in train, in
    either order."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs[:num_held_out]]
    train = sorted({order for a, b in pairs[num_held_out:] for order in ((a, b), (b, a))})
    rng.shuffle(train)
    return train, held_out


def make_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema, with the right answer as ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(problem))},
        "extra_info": {"split": split, "index": index},
    }


def question(problem: Problem) -> str:
    return f"{problem[0]}+{problem[1]}="


def careless_sum(problem: Problem, forgotten_carries: float, rng: random.Random) -> str:
    """Adds digit by digit from the right, and forgets each carry with the given probability."""
    (a_tens, a_units), (b_tens, b_units) = divmod(problem[0], 10), divmod(problem[1], 10)

    def carry(digit_sum: int) -> int:
        return int(digit_sum >= 10 and rng.random() >= forgotten_carries)

    units = a_units + b_units
    tens = a_tens + b_tens + carry(units)
    return f"{carry(tens) or ''}{tens % 10}{units % 10}"


def careless_answers(problems: list[Problem], settings: Settings) -> list[dict[str, Any]]:
    """What the warm-up learns from: rows of random problems and careless answers, which `main_sft`
    reads."""
    rng = random.Random(settings.seed)
    drawn = rng.choices(problems, k=settings.num_answers)
    answers = [careless_sum(problem, settings.forgotten_carries, rng) for problem in drawn]
    return [
        {"prompt": question(problem), "response": answer, "is_right": answer == str(sum(problem))}
        for problem, answer in zip(drawn, answers, strict=True)
    ]


def make_tokenizer() -> PreTrainedTokenizerBase:
    """One token a character, with a chat template in the manner of DeepSeek's."""
    backend = Tokenizer(
        models.WordLevel(
            {token: index for index, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with random weights: DeepSeek-LLM's architecture (Llama), or Qwen3's mixture of
    experts."""
    torch.manual_seed(settings.seed)
    num_heads = settings.hidden_size // HEAD_DIM
    common: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        # About 1/sqrt(hidden_size): this narrow a model learns sums slowly from 0.02
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if settings.num_experts:
        config = Qwen3MoeConfig(
            **common,
            num_experts=settings.num_experts,
            num_experts_per_tok=2,
            # Two experts together are as wide as the layer of the model without experts.
            moe_intermediate_size=settings.hidden_size,
            norm_topk_prob=True,
            router_aux_loss_coef=0.01,
        )
    else:
        config = LlamaConfig(**common, intermediate_size=2 * settings.hidden_size)
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def exact_match(path: Path, problems: list[Problem]) -> float:
    """Share of the problems that greedy decoding of a saved model answers right."""
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    chats = [[{"role": "user", "content": question(problem)}] for problem in problems]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    outputs = model.generate(**encoded, max_new_tokens=MAX_ANSWER_LENGTH, do_sample=False)
    answers = tokenizer.batch_decode(
        outputs[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = sum(
        answer.strip() == str(sum(problem))
        for answer, problem in zip(answers, problems, strict=True)
    )
    return right / len(problems)


def warm_up(folder: Path, settings: Settings) -> None:
    """Fine-tunes the model in `folder` on the answers beside it, with `main_sft`, of which only
    errors are shown."""
    config = ["--config-dir", str(Path(__file__).parent / "config"), "--config-name", "warm_up"]
    with tempfile.TemporaryDirectory() as runs:
        overrides = [
            f"data.train_files={folder}/answers.parquet",
            f"data.train_batch_size={settings.warm_up_batch_size}",
            f"model.path={folder}/model",
            f"training.optim.lr={settings.learning_rate}",
            f"trainer.total_epochs={settings.warm_up_epochs}",
            f"trainer.seed={settings.seed}",
            f"trainer.default_local_dir={runs}",
        ]
        command = [sys.executable, "-m", "verl_like.trainer.main_sft", *config, *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (trained,) = Path(runs, "latest").glob("*/model/huggingface/model.safetensors")
        shutil.copy(trained, folder / "model")


def write_inputs(folder: Path, settings: Settings) -> float:
    """Writes the data, the tokenizer and the model with random weights; returns the share of wrong
    answers."""
    train, held_out = split_problems(settings.num_held_out, settings.seed)
    for split, problems in (("train", train), ("test", held_out)):
        rows = [make_row(problem, split, index) for index, problem in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    answers = careless_answers(train, settings)
    pq.write_table(pa.Table.from_pylist(answers), folder / "answers.parquet")
    tokenizer = make_tokenizer()
    make_model(settings, tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return sum(not row["is_right"] for row in answers) / len(answers)


def write_world(folder: Path, settings: Settings) -> dict[str, Any]:
    """Writes everything into `folder`, `world.json` last; returns the latter's content."""
    wrong = write_inputs(folder, settings)
    _, held_out = split_problems(settings.num_held_out, settings.seed)
    before = exact_match(folder / "model", held_out)
    print(
        f"Warming up a tiny model on {settings.num_answers:,} answers, about a minute ...",
        flush=True,
    )
    warm_up(folder, settings)
    world = {
        "settings": asdict(settings),
        "wrong_warm_up_answers": wrong,
        "exact_match_before_warm_up": before,
        "held_out_exact_match": exact_match(folder / "model", held_out),
    }
    (folder / "world.json").write_text(json.dumps(world, indent=2) + "\n", encoding="utf-8")
    return world


def make_toy_world(out: Path, settings: Settings) -> dict[str, Any]:
    """Makes the folder `out` unless it is there with the same settings; returns the content of its
    `world.json`.

    The folder appears as a whole or not at all: it is written beside `out` and renamed.

    Raises:
        ValueError: `out` is something else than a toy world.
    """
    record = out / "world.json"
    if record.is_file():
        world = json.loads(record.read_text(encoding="utf-8"))
        if world["settings"] == asdict(settings):
            print(
                f"Toy model and data are in {out} already (held-out exact match "
                f"{world['held_out_exact_match']:.3f})."
            )
            return world
    elif out.exists():
        raise ValueError(
            f"--out {out} exists and has no world.json, so it is left alone: give another folder"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        world = write_world(folder, settings)
        if out.exists():
            shutil.rmtree(out)
        os.replace(folder, out)
    print(
        f"{out}: warmed up in {time.monotonic() - started:.0f} s on answers of which "
        f"{world['wrong_warm_up_answers']:.0%} are wrong (forgotten carries)\n"
        f"{out}: held-out exact match {world['held_out_exact_match']:.3f} (greedy, "
        f"{settings.num_held_out} sums)"
    )
    return world


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".toy_world"), help="folder to make")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the data split, the weights and the warm-up"
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="experts of each layer; 0 makes a model without"
    )
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    # A model this small gains nothing from more, and one thread adds in one order
    torch.set_num_threads(1)
    try:
        settings = Settings(seed=arguments.seed, num_experts=arguments.experts)
        make_toy_world(arguments.out, settings)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
