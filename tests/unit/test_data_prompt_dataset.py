"""Reading, checking and tokenising prompts."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_like.data import PromptDataset
from verl_like.protocol.padded import padded

ROOT = Path(__file__).parents[2]
# One token a character; a user message "abc" becomes "U", "a", "b", "c", "A": two tokens more than
# its length.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role[0] | upper }}{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ start | default('A') }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = {
        character: index for index, character in enumerate("~" + "".join(map(chr, range(32, 126))))
    }
    backend = Tokenizer(models.WordLevel(alphabet, unk_token="~"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="}", unk_token="~")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def row(content: str = "what?", **changes: Any) -> dict[str, Any]:
    fields = {
        "data_source": "test/source",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0},
    }
    return {key: value for key, value in {**fields, **changes}.items() if value != "absent"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_all_formats_give_the_same_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, suffix: str
) -> None:
    file = write(
        tmp_path / f"rows{suffix}",
        [row("ab"), row("cde", reward_model={"style": "rule", "ground_truth": "8"})],
    )
    dataset = PromptDataset(file, tokenizer, max_prompt_length=8)
    assert len(dataset) == 2
    assert dataset[1] == {
        "index": 1,
        "input_ids": tokenizer.convert_tokens_to_ids(list("UcdeA")),
        "raw_prompt": [{"role": "user", "content": "cde"}],
        "data_source": "test/source",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"split": "train", "index": 0},
    }


def test_the_tokens_are_those_of_the_chat_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    file = write(tmp_path / "rows.jsonl", [row(prompt=messages)])
    dataset = PromptDataset(file, tokenizer, apply_chat_template_kwargs={"start": "B:"})
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, start="B:"
    )
    assert dataset[0]["input_ids"] == expected["input_ids"]
    assert tokenizer.convert_ids_to_tokens(dataset[0]["input_ids"]) == list("Sbe briefUwhy?B:")


def test_keys_that_parquet_adds_for_other_rows_do_not_reach_the_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    named = {"role": "user", "content": "hi", "name": "Ann"}
    file = write(tmp_path / "rows.parquet", [row(prompt=[named]), row("ho")])
    dataset = PromptDataset(file, tokenizer)
    assert dataset[0]["raw_prompt"] == [named]
    assert dataset[1]["raw_prompt"] == [{"role": "user", "content": "ho"}]


def test_several_files_max_samples_and_other_field_names(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    renamed = {
        **row("x", prompt="absent", data_source="absent"),
        "chat": row("x")["prompt"],
        "origin": "here",
    }
    files = [
        write(tmp_path / "a.jsonl", [renamed] * 2),
        write(tmp_path / "b.parquet", [renamed] * 3),
    ]
    keys = {"prompt_key": "chat", "reward_fn_key": "origin"}
    assert len(PromptDataset(files, tokenizer, **keys)) == 5
    dataset = PromptDataset(files, tokenizer, max_samples=3, **keys)
    assert len(dataset) == 3 and dataset[2]["data_source"] == "here"


def test_collate_keeps_prompts_without_padding_says_how_they_are_padded_and_names_rows_by_epoch_and_index(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row("abc"), row("d", extra_info=None), row("ef")])
    dataset = PromptDataset(file, tokenizer, max_prompt_length=6, max_response_length=3)
    batch = dataset.collate([dataset[2], dataset[1]], epoch=4)
    pad, (u, e, f, d, a) = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(list("UefdA"))
    assert [row.tolist() for row in batch.batch["prompts"].unbind()] == [[u, e, f, a], [u, d, a]]
    assert list(batch.tensors()) == ["prompts"] and batch.meta_info == {"padding": (6, 3, pad)}
    in_verls_layout = padded(batch).batch
    assert in_verls_layout["input_ids"].tolist() == [
        [pad, pad, u, e, f, a],
        [pad, pad, pad, u, d, a],
    ]
    assert in_verls_layout["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert in_verls_layout["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 1, 2]]
    assert {column.dtype for column in in_verls_layout.values()} == {torch.int64}
    assert (
        PromptDataset(file, tokenizer, max_prompt_length=6).collate([dataset[2]], epoch=4).meta_info
        == {}
    )
    assert batch.non_tensor_batch["uid"].tolist() == ["4-2", "4-1"]
    assert batch.non_tensor_batch["data_source"].tolist() == ["test/source"] * 2
    assert batch.non_tensor_batch["reward_model"][0] == {"style": "rule", "ground_truth": "7"}
    assert batch.non_tensor_batch["extra_info"].tolist() == [{"split": "train", "index": 0}, {}]
    assert batch.non_tensor_batch["raw_prompt"][1] == [{"role": "user", "content": "d"}]
    assert all(column.dtype == np.dtype(object) for column in batch.non_tensor_batch.values())


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", "defghA"), ("right", "Uabcde"), ("middle", "UabghA")]
)
def test_overlong_prompts_are_cut_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, truncation: Any, kept: str
) -> None:
    file = write(tmp_path / "rows.jsonl", [row("ab"), row("abcdefgh")])
    dataset = PromptDataset(file, tokenizer, max_prompt_length=6, truncation=truncation)
    assert tokenizer.convert_ids_to_tokens(dataset[1]["input_ids"]) == list(kept)
    assert tokenizer.convert_ids_to_tokens(dataset[0]["input_ids"]) == list("UabA")
    assert (dataset.num_truncated, dataset.num_filtered) == (1, 0)


def test_middle_truncation_to_an_odd_length_keeps_one_token_more_of_the_end(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row("abcdefgh")])
    dataset = PromptDataset(file, tokenizer, max_prompt_length=5, truncation="middle")
    assert tokenizer.convert_ids_to_tokens(dataset[0]["input_ids"]) == list("UaghA")


def test_overlong_prompts_are_filtered_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row("abcdefgh"), row("ab"), row("abcd")])
    dataset = PromptDataset(file, tokenizer, max_prompt_length=6, filter_overlong_prompts=True)
    assert [dataset[index]["raw_prompt"][0]["content"] for index in range(len(dataset))] == [
        "ab",
        "abcd",
    ]
    assert (dataset.num_filtered, dataset.num_truncated) == (1, 0)
    with pytest.raises(
        ValueError, match=r"all 3 prompts of .* longer than data.max_prompt_length=2"
    ):
        PromptDataset(file, tokenizer, max_prompt_length=2, filter_overlong_prompts=True)


def test_an_overlong_prompt_is_an_error_that_names_the_row_and_the_fixes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row("ab"), row("abcdef"), row("abcdefgh")])
    with pytest.raises(ValueError) as error:
        PromptDataset(file, tokenizer, max_prompt_length=6)
    message = str(error.value)
    assert f"{file}, row 1: the prompt has 8 tokens, more than data.max_prompt_length=6" in message
    assert "2 of 3 prompts are too long, the longest has 10" in message
    fixes = (
        "data.max_prompt_length=10",
        "data.filter_overlong_prompts=True",
        "truncation=left",
        "truncation=right",
    )
    assert all(fix in message for fix in fixes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt": "absent"},
            "field 'prompt' is missing, expected a list of chat messages .*set data.prompt_key",
        ),
        ({"prompt": "why?"}, "field 'prompt' is str 'why\\?', expected a list of chat messages"),
        ({"prompt": []}, "field 'prompt' is an empty list, expected a list of chat messages"),
        ({"prompt": ["why?"]}, r"field prompt\[0\] is str 'why\?', expected a chat message"),
        (
            {"prompt": [{"role": "user"}]},
            r"field prompt\[0\]\['content'\] is missing, expected a text",
        ),
        (
            {"prompt": [{"role": 1, "content": ""}]},
            r"field prompt\[0\]\['role'\] is int 1, expected a text",
        ),
        ({"data_source": "absent"}, "field 'data_source' is missing, expected a string"),
        ({"data_source": 3}, "field 'data_source' is int 3, expected a string"),
        ({"reward_model": "absent"}, "field 'reward_model' is missing, expected .*ground_truth"),
        ({"reward_model": "7"}, "field 'reward_model' is str '7', expected"),
        (
            {"reward_model": {"style": "rule"}},
            r"reward_model\['ground_truth'\] is missing, expected the right answer",
        ),
        (
            {"reward_model": {"style": "rule", "ground_truth": float("nan")}},
            r"reward_model\['ground_truth'\] is float nan, expected the right answer, since no "
            r"answer equals NaN",
        ),
        (
            {"reward_model": {"style": "rule", "ground_truth": {"parts": [1.0, float("nan")]}}},
            r"reward_model\['ground_truth'\] is dict .*nan.*, expected the right answer",
        ),
        (
            {"images": [{"bytes": "x"}]},
            "field 'images' is list .*, expected nothing, since the models here read text",
        ),
        ({"video": "x" * 100}, "field 'video' is str '" + "x" * 79 + ", expected nothing"),
        ({"video": "clip.mp4"}, "field 'video' is str 'clip.mp4', expected nothing"),
        ({"extra_info": "index 3"}, "field 'extra_info' is str 'index 3', expected an object"),
    ],
)
def test_a_malformed_row_is_named_with_field_and_expectation(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "rows.jsonl", [row(), row(**changes)])
    with pytest.raises(ValueError) as error:
        PromptDataset(file, tokenizer)
    assert str(error.value).startswith(f"{file}, row 1: ")
    assert re.search(message, str(error.value))


def test_an_empty_column_for_images_says_nothing(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(
        tmp_path / "rows.parquet", [row(images=None, videos=[]), row(images=[], videos=None)]
    )
    assert len(PromptDataset(file, tokenizer)) == 2


def test_a_row_for_a_reward_model_needs_no_ground_truth(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row(reward_model={"style": "model"})])
    assert PromptDataset(file, tokenizer)[0]["reward_model"] == {"style": "model"}


def test_a_chat_template_failure_is_raised_with_the_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row(), row(prompt=[{"role": "tool", "content": "3"}])])
    with pytest.raises(
        ValueError,
        match=r"rows.jsonl, row 1: the chat template .* on roles \['tool'\].*no tools here",
    ):
        PromptDataset(file, tokenizer, filter_overlong_prompts=True)


def test_a_tokenizer_without_chat_template_or_padding_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row()])
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(
        ValueError, match=r"no chat template: .*actor_rollout_ref.model.tokenizer_path"
    ):
        PromptDataset(file, bare)
    bare.chat_template = TEMPLATE
    with pytest.raises(ValueError, match="neither a padding nor an end-of-sequence token"):
        PromptDataset(file, bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.parquet", None, "does not exist"),
        ("rows.csv", b"a,b", r"ends in '.csv', expected .parquet, .jsonl or .json"),
        ("rows.parquet", b"not parquet at all", "is not a readable Parquet file"),
        ("rows.jsonl", b'{"a": 1}\n\xff\xfe', r"row 1: not JSON in UTF-8: .*utf-8"),
        ("rows.jsonl", b'{"a": 1}\n{"a":', r"row 1: not JSON in UTF-8"),
        ("rows.jsonl", b"[1, 2]\n", r"row 0: the row is list \[1, 2\], expected an object"),
        ("rows.json", b'{"a": 1}', r"holds dict .*expected a list of rows"),
        ("rows.jsonl", b"\n", r"no rows in .*rows.jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        PromptDataset(str(tmp_path / name), tokenizer)
    assert re.search(message, str(error.value), re.DOTALL) and name in str(error.value)


def test_text_of_a_parquet_file_that_is_not_utf8_is_named_by_row_and_field(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = pa.py_buffer(b"good" + b"b\xffd" + b"good")
    offsets = pa.array([0, 4, 7, 11], pa.int32()).buffers()[1]
    table = pa.table(
        {"id": [1, 2, 3], "data_source": pa.StringArray.from_buffers(3, offsets, texts)}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(
        ValueError, match=r"rows.parquet, row 1: field 'data_source' cannot be read: 'utf-8' codec"
    ):
        PromptDataset(str(tmp_path / "rows.parquet"), tokenizer)


@pytest.mark.parametrize("depth", [150, 100_000])  # JSON is read to about 1,000
def test_a_row_that_is_nested_too_deeply_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, depth: int
) -> None:
    lines = [json.dumps(row()), '{"extra_info": ' + '{"a": ' * depth + "1" + "}" * depth + "}"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        ValueError, match=r"rows.jsonl, row 1: lists or objects are nested deeper than 100 levels"
    ):
        PromptDataset(str(tmp_path / "rows.jsonl"), tokenizer)


def test_many_lists_beside_each_other_are_not_deep(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row(extra_info={"cells": [[], [{}]] * 300})])
    assert PromptDataset(file, tokenizer)[0]["extra_info"]["cells"][-1] == [{}]


def test_half_a_character_in_a_prompt_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write(tmp_path / "rows.jsonl", [row(), row("a \ud83d b"), row("\ud83d\ude00")])
    with pytest.raises(ValueError) as error:
        PromptDataset(file, tokenizer)
    assert f"{file}, row 1: field prompt[0]['content'] has \\ud83d at character 2" in str(
        error.value
    )


def test_half_a_character_in_the_name_of_a_data_set_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    file = write(tmp_path / "rows.jsonl", [row(data_source="sums \udc0a")])
    with pytest.raises(ValueError) as error:
        PromptDataset(file, tokenizer)
    assert f"{file}, row 0: field 'data_source' has \\udc0a at character 5" in str(error.value)


def test_no_files_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"no rows in data files \(none given\)"):
        PromptDataset([], tokenizer)


def test_the_gsm8k_script_writes_rows_that_load(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    sample = {
        "question": "A pen costs $500. How much are 3 pens?",
        "answer": "3 * 500 = <<3*500=1500>>1500\n#### 1,500",
    }
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(sample) + "\n")
    assert gsm8k("--local_dir", str(tmp_path), "--out_dir", str(tmp_path / "out")).returncode == 0
    dataset = PromptDataset(
        [str(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")], tokenizer
    )
    assert len(dataset) == 2
    assert dataset[1]["data_source"] == "openai/gsm8k"
    assert dataset[1]["reward_model"] == {"style": "rule", "ground_truth": "1500"}
    assert dataset[1]["extra_info"] == {"split": "test", "index": 0, **sample}
    assert dataset[1]["raw_prompt"][0]["content"].endswith('output the final answer after "####".')


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, "has no train.jsonl: give the folder with GSM8K's own JSONL files"),
        (b'{"question": "a"}', "train.jsonl, row 0: the row has no text 'answer'"),
        (b'\n{"question": "\xff"', "train.jsonl, row 1: not JSON in UTF-8"),
        (b'{"question": "a", "answer": "b"}', "train row 0: the answer has no '#### <number>'"),
    ],
)
def test_the_gsm8k_script_refuses_other_files_in_a_sentence(
    tmp_path: Path, train: bytes | None, message: str
) -> None:
    if train is not None:
        (tmp_path / "train.jsonl").write_bytes(train)
    done = gsm8k("--local_dir", str(tmp_path), "--out_dir", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stderr.startswith("gsm8k.py: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is not None, reason="the package datasets is installed"
)
def test_the_gsm8k_script_without_a_folder_says_which_package_the_hub_needs(tmp_path: Path) -> None:
    done = gsm8k("--out_dir", str(tmp_path / "out"))
    assert done.returncode == 2 and "pip install -e '.[hub]', or give the folder" in done.stderr
    assert done.stderr.count("\n") == 1


def gsm8k(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "examples/data_preprocess/gsm8k.py")]
    return subprocess.run([*script, *arguments], capture_output=True, text=True, timeout=60)
