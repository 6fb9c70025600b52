"""Reads rows in verl's schema from Parquet, JSONL and JSON files and checks them."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

_NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of other frameworks with images, videos and sounds, which no model here reads."""

_MAX_NESTING = 100
"""So many lists and objects may be nested in each other in a row."""


@dataclass(frozen=True)
class PromptRow:
    """A checked row."""

    place: str
    """The file and the number of the row, for error messages. Rows are counted from 0, and in JSONL
    empty lines count too."""
    raw_prompt: list[dict[str, Any]]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


def read_prompt_rows(
    files: Sequence[str], prompt_key: str, reward_fn_key: str, max_samples: int
) -> list[PromptRow]:
    """Reads and checks the rows of all files in order. If `max_samples` is not negative, only so
    many rows are read.

    Raises ValueError if a file is missing, unreadable or of another format, if a row breaks the
    schema, or if there are no rows.
    """
    rows = [
        _check_record(record, place, prompt_key, reward_fn_key)
        for place, record in read_records(files, max_samples)
    ]
    if not rows:
        raise ValueError(
            f"no rows in {', '.join(files) or 'data files (none given)'}: give at least one prompt"
        )
    return rows


def read_records(files: Sequence[str], max_samples: int) -> list[tuple[str, Any]]:
    """Reads the rows of all files in order, and returns (place, row) of each. If `max_samples` is
    not negative, only so many rows are read.

    Raises ValueError for a file that is missing, unreadable or of another format, and for a row
    that is no object, or has an image, a video or a sound.
    """
    records: list[tuple[str, Any]] = []
    for file in files:
        wanted = None if max_samples < 0 else max_samples - len(records)
        for index, record in _read_file(file)[:wanted]:
            records.append((f"{file}, row {index}", record))
    for place, record in records:
        _require_texts(record, place)
    return records


def _require_texts(record: Any, place: str) -> None:
    """Raises ValueError for a row that is no object, or has an image, a video or a sound."""
    if not isinstance(record, dict):
        raise bad_row(place, "the row", record, "an object with named fields")
    for name in _NOT_TEXT:
        if record.get(name):
            expected = (  # `bad_row` writes "expected" before it
                "nothing, since the models here read text alone: leave the column out, or the row"
            )
            raise bad_row(place, f"field {name!r}", record[name], expected)


def _read_file(file: str) -> list[tuple[int, Any]]:
    """Returns the rows of a file with their numbers. An empty line of JSONL is not a row, but
    counts in the numbers."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"data file {file} does not exist (looked for {path.resolve()})")
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"data file {file} is not a readable Parquet file: {error}") from error
        try:
            return list(enumerate(table.to_pylist()))
        except (ValueError, OverflowError) as error:  # for instance, text is not UTF-8
            raise ValueError(f"{_first_unreadable(table, file)} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        lines = path.read_bytes().split(b"\n")
        return [
            (index, _parse_json(line, f"{file}, row {index}"))
            for index, line in enumerate(lines)
            if line.strip()
        ]
    if path.suffix == ".json":
        records = _parse_json(path.read_bytes(), file)
        if not isinstance(records, list):
            raise ValueError(
                f"data file {file} holds {_found(records)}, expected a list of rows; one row a "
                "line is .jsonl"
            )
        return list(enumerate(records))
    raise ValueError(
        f"data file {file} ends in {path.suffix!r}, expected .parquet, .jsonl or .json"
    )


def _first_unreadable(table: pa.Table, file: str) -> str:
    """Names the first row and field of a table that cannot be turned into a Python value."""
    for index in range(table.num_rows):
        for name in table.column_names:
            try:
                table[name].slice(index, 1).to_pylist()
            except (ValueError, OverflowError):
                return f"{file}, row {index}: field {name!r}"
    raise AssertionError("every field can be read by itself")


def _parse_json(text: bytes, place: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not JSON in UTF-8, or nested too
    deeply."""
    try:
        value = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise _too_deep(place) from None
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{place}: not JSON in UTF-8: {error}") from error
    if text.count(b"[") + text.count(b"{") > _MAX_NESTING:
        _require_shallow(value, place)
    return value


def _require_shallow(value: Any, place: str) -> None:
    """Raises ValueError for a value of more than `_MAX_NESTING` levels, of which a number in a list
    is the second. Later code sends and compares values by recursion, which would fail."""
    level = [value]
    for _ in range(_MAX_NESTING):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        if not below:
            return
        level = below
    raise _too_deep(place)


def _too_deep(place: str) -> ValueError:
    return ValueError(
        f"{place}: lists or objects are nested deeper than {_MAX_NESTING} levels; correct the row"
    )


def _check_record(record: Any, place: str, prompt_key: str, reward_fn_key: str) -> PromptRow:
    """Returns the checked row of a prompt. Raises ValueError for the first field that is missing or
    wrong."""
    messages = record.get(prompt_key)
    if not isinstance(messages, list) or not messages:
        expected = 'a list of chat messages [{"role": "user", "content": "..."}]'
        if messages is None:
            expected += f"; the row has {', '.join(record)}: set data.prompt_key"
        raise bad_row(place, f"field {prompt_key!r}", messages, expected)
    messages = check_messages(messages, prompt_key, place)
    data_source = record.get(reward_fn_key)
    field = f"field {reward_fn_key!r}"
    if not isinstance(data_source, str) or not data_source:
        raise bad_row(place, field, data_source, "a string that names the data set")
    require_characters(data_source, field, place)  # the names of metrics have it
    reward_model = record.get("reward_model")
    if not isinstance(reward_model, dict):
        raise bad_row(
            place, "field 'reward_model'", reward_model, '{"style": "rule", "ground_truth": ...}'
        )
    ground_truth = reward_model.get("ground_truth")
    field = "field reward_model['ground_truth']"
    if ground_truth is None and reward_model.get("style") != "model":
        expected = 'the right answer (or "style": "model" in reward_model)'
        raise bad_row(place, field, None, expected)
    if _has_nan(ground_truth):
        expected = "the right answer, since no answer equals NaN: correct the row, or leave it out"
        raise bad_row(place, field, ground_truth, expected)
    extra_info = record.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        expected = "an object with named fields, or nothing"
        raise bad_row(place, "field 'extra_info'", extra_info, expected)
    return PromptRow(place, messages, data_source, reward_model, extra_info or {})


def _has_nan(value: Any) -> bool:
    """Returns whether a value is NaN or contains NaN."""
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def check_messages(messages: Sequence[Any], field: str, place: str) -> list[dict[str, Any]]:
    """Returns the messages without keys whose value is null. In Parquet each message has the keys
    of all messages, and they are null if it lacks them. Raises ValueError unless each message has
    the texts `role` and `content`."""
    checked = []
    for position, message in enumerate(messages):
        name = f"field {field}[{position}]"
        if not isinstance(message, dict):
            raise bad_row(place, name, message, 'a chat message {"role": "user", "content": "..."}')
        for key in ("role", "content"):
            text = message.get(key)
            if not isinstance(text, str):
                expected = 'a text, which beside tool_calls may be ""'
                raise bad_row(place, f"{name}[{key!r}]", text, expected)
            require_characters(text, f"{name}[{key!r}]", place)
        given = {key: value for key, value in message.items() if value is not None}
        checked.append(given)
    return checked


def require_characters(text: str, field: str, place: str) -> str:
    """Returns the text. Raises ValueError if it has a lone surrogate, which JSON may contain but
    which no tokenizer can read."""
    if found := re.search("[\ud800-\udfff]", text):
        code = f"\\u{ord(found[0]):04x}"
        raise ValueError(
            f"{place}: {field} has {code} at character {found.start()}, which is half of a "
            "character; expected text that can be written in UTF-8"
        )
    return text


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    place: str,
    options: Mapping[str, Any],
) -> str:
    """Returns the text that the chat template makes of messages. Raises ValueError, which names the
    row, if the template fails."""
    chat: Any = list(messages)
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"{place}: the chat template of the tokenizer {tokenizer.name_or_path!r} fails on "
            f"roles {[message['role'] for message in messages]}: {type(error).__name__}: {error}"
        ) from error
    return require_characters(text, "the text of the chat template", place)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the padding token, or the end-of-sequence token if there is no padding token. Raises
    ValueError if there is neither."""
    token = tokenizer.pad_token_id
    if token is None:
        token = tokenizer.eos_token_id
    if token is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has neither a padding nor an "
            "end-of-sequence token"
        )
    return token


def _found(value: Any) -> str:
    """Describes a wrong value for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, list) and not value:
        return "an empty list"
    return f"{type(value).__name__} {repr(value)[:80]}"


def bad_row(place: str, field: str, value: Any, expected: str) -> ValueError:
    """Makes the error that says which field of which row is wrong, and what is expected."""
    found = "missing" if value is None else _found(value)
    return ValueError(f"{place}: {field} is {found}, expected {expected}")
