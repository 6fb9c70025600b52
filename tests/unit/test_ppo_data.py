"""Which prompts the trainer and the validation read."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.inputs import load_dataset


@pytest.mark.parametrize(
    ("limits", "lengths"), [((2, -1), (2, 5)), ((-1, 3), (6, 3)), ((4, 1), (4, 1))]
)
def test_training_and_validation_prompts_have_a_limit_each(
    limits: tuple[int, int], lengths: tuple[int, int], tiny_llama: Callable, tmp_path: Path
):
    path, _ = tiny_llama(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "1"}}
    for name, number in (("train", 6), ("val", 5)):
        rows = [
            row | {"prompt": [{"role": "user", "content": f"{index}+1"}]} for index in range(number)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    files = [f"data.{name}_files={tmp_path}/{name}.parquet" for name in ("train", "val")]
    of_parts = [
        f"data.{name}_max_samples={limit}"
        for name, limit in zip(("train", "val"), limits, strict=True)
    ]
    config = load_ppo_config([*files, *of_parts, f"actor_rollout_ref.model.path={path}"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tuple(len(load_dataset(config, tokenizer, part)) for part in ("train", "val")) == lengths
