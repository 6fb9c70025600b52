"""Makes the data of `scripts/gpu_rehearsal.py` in a folder: the toy world, pairs of answers, random walks."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet

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


def main(folder: Path) -> None:
    world = folder / ".toy_world"
    call(make_toy_world.main, "--out", str(world))
    (world / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs(world)))
    call(walks.main, "--out", str(world / "walks"), "--seed", "1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
