"""Makes the data of `scripts/gpu_rehearsal.py` in a folder: the toy world, pairs of answers, random walks.

Also the toy world's model with a vocabulary that is padded to 256 rows.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def main(folder: Path) -> None:
    world = folder / ".toy_world"
    call(make_toy_world.main, "--out", str(world))
    (world / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs(world)))
    pad_vocabulary(world / "model", world / "wide_model")
    call(walks.main, "--out", str(world / "walks"), "--seed", "1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
