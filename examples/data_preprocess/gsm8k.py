"""Writes GSM8K as Parquet files in the row schema of `docs/data.md`.

    python examples/data_preprocess/gsm8k.py --local_dir gsm8k_raw --out_dir data/gsm8k

`--local_dir` holds GSM8K's own train.jsonl and test.jsonl; without it they come from the Hugging Face hub, which needs
the `hub` extra.
"""

import argparse
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
        raise ValueError(f"{split} row {index}: the answer has no '#### <number>': {answer[-80:]!r}")
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
        import datasets  # optional: only the hub needs it

        return list(datasets.load_dataset(DATA_SOURCE, "main", split=split))
    file = Path(local_dir).expanduser() / f"{split}.jsonl"
    if not file.is_file():
        raise ValueError(f"--local_dir {local_dir} has no {split}.jsonl: give the folder with GSM8K's own JSONL files")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", help="folder with train.jsonl and test.jsonl (default: the Hugging Face hub)")
    parser.add_argument("--out_dir", default="data/gsm8k", help="folder for train.parquet and test.parquet")
    arguments = parser.parse_args()
    out_dir = Path(arguments.out_dir).expanduser()
    out_dir.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        samples = read_split(arguments.local_dir, split)
        rows = [make_row(sample["question"], sample["answer"], split, index) for index, sample in enumerate(samples)]
        pq.write_table(pa.Table.from_pylist(rows), out_dir / f"{split}.parquet")
        print(f"{out_dir / split}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main()
