"""Writes GSM8K as Parquet files in the row schema of `docs/data.md`.

    python examples/data_preprocess/gsm8k.py --local_dir gsm8k_raw --out_dir data/gsm8k

`--local_dir` holds GSM8K's own train.jsonl and test.jsonl; without it they come from the Hugging
Face hub, which needs the `hub` extra.
"""

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def make_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """One row; the ground truth is what follows `####` in the answer, without thousands separators.

    Raises:
        ValueError: the answer has no `####` followed by a number.
    """
    number = re.search(r"#### (-?[0-9.,]+)", answer)
    if number is None:
        raise ValueError(
            f"{split} row {index}: the answer has no '#### <number>': {answer[-80:]!r}"
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def read_split(local_dir: str | None, split: str) -> list[dict[str, str]]:
    """GSM8K's own {"question", "answer"} rows of a split."""
    if local_dir is None:
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(
                "without --local_dir the data comes from the Hugging Face hub, which needs the "
                "package datasets: pip install -e '.[hub]', or give the folder with GSM8K's own "
                "train.jsonl and test.jsonl"
            )
        import datasets  # optional: only the hub needs it

        return list(datasets.load_dataset(DATA_SOURCE, "main", split=split))
    file = Path(local_dir).expanduser() / f"{split}.jsonl"
    if not file.is_file():
        raise ValueError(
            f"--local_dir {local_dir} has no {split}.jsonl: give the folder with GSM8K's own JSONL "
            "files"
        )
    lines = enumerate(file.read_bytes().split(b"\n"))
    return [_sample(line, f"{file}, row {index}") for index, line in lines if line.strip()]


def _sample(line: bytes, place: str) -> dict[str, str]:
    try:
        sample = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON in UTF-8: {error}") from error
    for field in ("question", "answer"):
        if not isinstance(sample, dict) or not isinstance(sample.get(field), str):
            raise ValueError(f"{place}: the row has no text {field!r}, as GSM8K's own files have")
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--local_dir", help="folder with train.jsonl and test.jsonl (default: the Hugging Face hub)"
    )
    parser.add_argument(
        "--out_dir", default="data/gsm8k", help="folder for train.parquet and test.parquet"
    )
    arguments = parser.parse_args()
    try:
        write_splits(arguments.local_dir, Path(arguments.out_dir).expanduser())
    # OSError: a folder that cannot be written, a hub that cannot be reached
    except (ValueError, OSError) as error:
        parser.exit(2, f"gsm8k.py: {error}\n")


def rows_of(local_dir: str | None, split: str) -> list[dict[str, Any]]:
    """The rows of a split."""
    samples = read_split(local_dir, split)
    return [
        make_row(sample["question"], sample["answer"], split, index)
        for index, sample in enumerate(samples)
    ]


def write_splits(local_dir: str | None, out_dir: Path) -> None:
    """Writes both splits. Raises ValueError for samples that cannot be read, before it writes
    anything."""
    rows = {split: rows_of(local_dir, split) for split in ("train", "test")}
    out_dir.mkdir(parents=True, exist_ok=True)
    for split, of_split in rows.items():
        pq.write_table(pa.Table.from_pylist(of_split), out_dir / f"{split}.parquet")
        print(f"{out_dir / split}.parquet: {len(of_split)} rows")


if __name__ == "__main__":
    main()
