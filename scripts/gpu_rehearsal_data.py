"""Makes the data of `scripts/gpu_rehearsal.py` in a folder: the toy world, pairs of answers, random
walks.

Also the toy world's model with a vocabulary that is padded to 256 rows, one with experts and the
same, and a 7B model without values.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.ilql import walks
from examples.split_placement import make_toy_world


def pairs(world: Path) -> list[dict[str, object]]:
    """Of each training prompt the right number and the one after it."""
    rows = parquet.read_table(world / "train.parquet").to_pylist()
    truths = [int(row["reward_model"]["ground_truth"]) for row in rows]
    return [
        {"prompt": row["prompt"], "chosen": str(truth), "rejected": str(truth + 1)}
        for row, truth in zip(rows, truths, strict=True)
    ]


def call(main: Callable[[], None], *arguments: str) -> None:
    """Calls the main function of a script with these arguments."""
    sys.argv[1:] = arguments
    main()


def pad_vocabulary(model: Path, out: Path) -> None:
    """The model with rows of its embedding and head that no token has."""
    padded = AutoModelForCausalLM.from_pretrained(model)
    padded.resize_token_embeddings(256)
    padded.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def write_7b(tokenizer: Path, out: Path) -> None:
    """A model of DeepSeek-LLM-7B's shape, beside the toy tokenizer, in a file that takes no room on
    the disk."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=102_400,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=30,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    config.save_pretrained(out)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)
    with torch.device("meta"):
        shapes = {
            name: list(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()
        }
    write_hole(shapes, out / "model.safetensors")


def write_hole(shapes: dict[str, list[int]], file: Path) -> None:
    """A safetensors file of bfloat16 tensors. Only its header is written; the rest is a hole, read
    as zeros."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        start = end
        end = end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as hole:
        hole.write(len(text).to_bytes(8, "little") + text)
        hole.truncate(8 + len(text) + end)


def main(folder: Path) -> None:
    world = folder / ".toy_world"
    call(make_toy_world.main, "--out", str(world))
    (world / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs(world)))
    pad_vocabulary(world / "model", world / "wide_model")
    write_7b(world / "model", world / "deepseek_7b")
    of_experts = world / "of_experts"
    call(make_toy_world.main, "--out", str(of_experts), "--experts", "8")
    pad_vocabulary(of_experts / "model", of_experts / "wide_model")
    call(walks.main, "--out", str(world / "walks"), "--seed", "1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
