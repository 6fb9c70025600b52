"""The prompts of a run. They are tokenised once, when they are loaded."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from verl_like.data.rows import PromptRow, padding_token, read_prompt_rows, render
from verl_like.data.token_limit import TokenLimit
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists

_PORTION_CHARACTERS = 1 << 22


class PromptDataset:
    """Rows in verl's schema with their prompts as token ids. No prompt is longer than
    `max_prompt_length`.

    Prompts go through the tokenizer's chat template with a generation prompt. The rollout continues
    exactly these tokens, and the length limit counts them. Arguments that are not listed are keys
    of `data` in docs/config.md. Raises ValueError if files, rows or the tokenizer cannot be used.
    The message names file, row and field.

    Args:
        files: Parquet, JSONL or JSON files, read in order.
        tokenizer: has a chat template, and a padding or an end-of-sequence token.
        max_prompt_length: the limit in tokens, and the width P of padded prompts.
        max_response_length: the width R of padded responses.

    Attributes:
        num_filtered: the number of rows that were left out because they are too long.
        num_truncated: the number of rows that lost tokens.
        highest_token: (token id, place) of the highest token id.
    """

    def __init__(
        self,
        files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        reward_fn_key: str = "data_source",
        max_prompt_length: int = 512,
        max_response_length: int | None = None,
        filter_overlong_prompts: bool = False,
        truncation: Literal["error", "left", "right", "middle"] = "error",
        max_samples: int = -1,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_prompt_length = max_prompt_length
        self.max_response_length = max_response_length
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use an "
                "instruction-tuned model, or set actor_rollout_ref.model.tokenizer_path to a "
                "tokenizer that has one"
            )
        self.pad_token_id = padding_token(tokenizer)
        paths = [files] if isinstance(files, str) else files
        rows = read_prompt_rows(paths, prompt_key, reward_fn_key, max_samples)
        options = {**(apply_chat_template_kwargs or {}), "add_generation_prompt": True}
        texts = [render(tokenizer, row.raw_prompt, row.place, options) for row in rows]
        num_rows = len(rows)
        # A text that will be truncated has to be tokenised anyway.
        if filter_overlong_prompts or truncation == "error":
            limit = TokenLimit(tokenizer, max_prompt_length)
            fits = [not limit.is_exceeded(text) for text in texts]
            if not filter_overlong_prompts and not all(fits):
                first = fits.index(False)
                raise _overlong_text(rows[first], limit, texts[first])
            rows = list(itertools.compress(rows, fits))
            texts = list(itertools.compress(texts, fits))
        prompts = _tokenize(rows, texts, tokenizer)
        self.num_filtered = 0
        self.num_truncated = 0
        fits = [len(prompt) <= max_prompt_length for prompt in prompts]
        if filter_overlong_prompts:
            rows = list(itertools.compress(rows, fits))
            prompts = list(itertools.compress(prompts, fits))
            self.num_filtered = num_rows - len(rows)
            if not rows:
                raise ValueError(
                    f"all {self.num_filtered} prompts of {files} are longer than "
                    "data.max_prompt_length="
                    f"{max_prompt_length} and data.filter_overlong_prompts leaves none: raise "
                    "data.max_prompt_length"
                )
        else:
            overlong = [index for index, fit in enumerate(fits) if not fit]
            if overlong and truncation == "error":
                raise _overlong_error(rows, prompts, overlong, max_prompt_length)
            for index in overlong:
                prompts[index] = _truncated(prompts[index], max_prompt_length, truncation)
            self.num_truncated = len(overlong)
        self._rows = rows
        self._prompts = prompts
        self.highest_token = max(
            (max(prompt), row.place) for row, prompt in zip(rows, prompts, strict=True)
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a row as a dict of index, input_ids (list of token ids), raw_prompt, data_source,
        reward_model and extra_info. A negative index counts from the end."""
        row = self._rows[index]
        return {
            "index": range(len(self))[index],
            "input_ids": self._prompts[index],
            "raw_prompt": row.raw_prompt,
            "data_source": row.data_source,
            "reward_model": row.reward_model,
            "extra_info": row.extra_info,
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def collate(self, rows: Sequence[Mapping[str, Any]], epoch: int) -> DataProto:
        """Makes a batch of B rows.

        It has prompts (B, *) int64, jagged, and as object arrays of B uid ("epoch-index"),
        data_source, reward_model, extra_info and raw_prompt. If `max_response_length` is known, its
        meta_info has `padding`.
        """
        objects = {}
        for key in ("data_source", "reward_model", "extra_info", "raw_prompt"):
            objects[key] = [row[key] for row in rows]
        objects["uid"] = [f"{epoch}-{row['index']}" for row in rows]
        meta_info = {}
        if self.max_response_length is not None:
            meta_info["padding"] = (
                self.max_prompt_length,
                self.max_response_length,
                self.pad_token_id,
            )
        prompts = jagged_from_lists([row["input_ids"] for row in rows], torch.int64)
        return DataProto.from_dict({"prompts": prompts}, objects, meta_info)


def _tokenize(
    rows: Sequence[PromptRow], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Returns the token ids of each row's text. Raises ValueError for a text without tokens."""
    prompts = []
    for portion in _portions(texts):
        # The template has written the special tokens already. These are the same tokens as those
        # of apply_chat_template(tokenize=True), but computed for many rows at once.
        encoded = tokenizer(portion, add_special_tokens=False, return_attention_mask=False)
        prompts.extend(encoded["input_ids"])
    for row, prompt in zip(rows, prompts, strict=True):
        if not prompt:
            raise ValueError(
                f"{row.place}: the prompt has no tokens after the chat template, expected at least "
                "one"
            )
    return prompts


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """Divides texts into portions. The tokenizer takes a few seconds for a portion, in which no
    signal is handled."""
    portion = []
    num_characters = 0
    for text in texts:
        portion.append(text)
        num_characters += len(text)
        if num_characters > _PORTION_CHARACTERS:
            yield portion
            portion = []
            num_characters = 0
    if portion:
        yield portion


def _truncated(prompt: list[int], length: int, side: str) -> list[int]:
    """Leaves out tokens on the left, on the right or in the middle, so that `length` remain."""
    kept_at_start = {"left": 0, "middle": length // 2, "right": length}
    num_first = kept_at_start[side]
    num_last = length - num_first
    return prompt[:num_first] + prompt[len(prompt) - num_last :]


def _overlong_text(row: PromptRow, limit: TokenLimit, text: str) -> ValueError:
    """Makes the error for a text that has so many characters that it has too many tokens."""
    return ValueError(
        f"{row.place}: the prompt is longer than data.max_prompt_length={limit.max_tokens}: it "
        f"has {limit.reason(text)}. Choose one: data.filter_overlong_prompts=True to leave such "
        "prompts out; data.truncation=left (or middle) to keep their end; data.truncation=right "
        "to keep their beginning"
    )


def _overlong_error(
    rows: list[PromptRow], prompts: list[list[int]], overlong: list[int], limit: int
) -> ValueError:
    """Makes the error for prompts with too many tokens. `overlong` has their indices."""
    lengths = [len(prompts[index]) for index in overlong]
    return ValueError(
        f"{rows[overlong[0]].place}: the prompt has {lengths[0]} tokens, more than "
        f"data.max_prompt_length={limit} ({len(overlong)} of {len(rows)} prompts are too long, "
        f"the longest has {max(lengths)}). Choose one: data.max_prompt_length={max(lengths)} to "
        "keep them whole; data.filter_overlong_prompts=True to leave them out; "
        "data.truncation=left (or middle) to keep their end; data.truncation=right to keep their "
        "beginning"
    )
