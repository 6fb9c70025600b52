"""What fine-tuning, reward models and DPO cannot learn from is refused before Ray starts, with row
and way out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from test_sft import config_in, model_path

from verl_like.trainer.config.supervised import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from verl_like.trainer.supervised.run_supervised import run_supervised

assert model_path  # a fixture

ROW = {"prompt": "1+2", "response": "3", "chosen": "3", "rejected": "12"}
LONG = ROW | {"prompt": "1" * 30}  # conversations of 33 and 34 tokens
UNLEARNED = {"messages": [{"role": "user", "content": "1+2"}]}
PAIRS = [RMConfig, DPOConfig]
ALL = [SFTConfig, *PAIRS]
LONG_ROPE = (
    "rope_type: longrope, rope_theta: 1e4, factor: 4.0, original_max_position_embeddings: 20"
)
LONG_ROPE += f", short_factor: {[1.0] * 16}, long_factor: {[2.0] * 16}"
SHARED_BY_3 = ["training.ulysses_sequence_parallel_size=3", "trainer.n_gpus_per_node=3"]
SHARED_BY_3 += ["ray_kwargs.ray_init.num_cpus=3"]
CASES = [
    (
        [SFTConfig],
        {"question": "1+2", "answer": "3"},
        [],
        "field 'prompt' is missing, .* the row has question, answer",
    ),
    (
        PAIRS,
        {"question": "1+2", "answer": "3"},
        [],
        "field 'chosen' is missing, .* the row has question, answer",
    ),
    (PAIRS, ROW | {"rejected": "3"}, [], "chosen and rejected are the same"),
    (ALL, ROW | {"response": " ", "chosen": " "}, [], "turn 1, the assistant's, is empty"),
    ([SFTConfig], UNLEARNED, [], "none of the 4 tokens is learned"),
    (
        ALL,
        LONG,
        ["data.max_length=20", "data.overlong=truncate"],
        "none of the 20 tokens is learned",
    ),
    (
        ALL,
        LONG,
        ["data.max_length=20"],
        "the conversation has 3[34] tokens, more than data.max_length=20: raise it",
    ),
    (
        ALL,
        LONG,
        ["+model.override_config.max_position_embeddings=20"],
        "has 20 positions; .*row 2: the conversation has 3[34] tokens: lower data.max_length, with "
        "data.overlong=drop",
    ),
    (
        ALL,
        LONG,
        [f"+model.override_config.rope_parameters={{{LONG_ROPE}}}"],
        "has 20 positions before rope_type=longrope .*; .* 3[34] tokens: lower data.max_length, .* "
        "another model",
    ),
    (
        [SFTConfig],
        LONG,
        ["training.max_token_len_per_gpu=20"],
        "the conversation has 33 tokens, more than the 20 of",
    ),
    (
        PAIRS,
        LONG,
        ["training.max_token_len_per_gpu=40"],
        "the pair has 67 tokens, more than the 40 of a pass: raise",
    ),
    (
        [SFTConfig, DPOConfig],
        ROW,
        SHARED_BY_3,
        "parallel_size=3 does not divide the 4 attention heads of the model",
    ),
    (
        ALL,
        ROW,
        ["model.lora_rank=4", "model.target_modules=[no_proj]"],
        "model.target_modules=.*no_proj",
    ),
    (ALL, ROW, ["model.path=./no_model"], "model.path=./no_model: there is no model"),
]


@pytest.mark.parametrize(
    ("schema", "row", "settings", "message"),
    [
        pytest.param(kind, *case, marks=[pytest.mark.proof] * (kind != kinds[0]))
        for kinds, *case in CASES
        for kind in kinds
    ],
)
def test_bad_input_is_refused_before_ray_starts_and_a_bad_row_is_named(
    schema: type[SupervisedConfig],
    row: dict[str, Any],
    settings: list[str],
    message: str,
    tmp_path: Path,
    model_path: str,
    capfd: pytest.CaptureFixture[str],
):
    own = [f"data.val_files={tmp_path}/rows.jsonl", "training.max_token_len_per_gpu=80"]
    config = config_in(tmp_path, model_path, *own, *settings, schema=schema)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [ROW, ROW, row])))
    assert run_supervised(config) == 2
    assert not ray.is_initialized() and not (tmp_path / "runs").exists()
    said = capfd.readouterr().err
    assert re.search(message, said) and "Traceback" not in said
    assert row == ROW or f"{tmp_path}/rows.jsonl, row 2" in said
