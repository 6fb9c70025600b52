"""Conversations to learn from, tokenised once, with the tokens that the model is to write marked."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.data.rows import bad_row, read_records
from verl_like.protocol import DataProto

Message = Mapping[str, Any]


class ConversationDataset:
    """Rows of chat messages as token ids, none longer than `max_length`, of which assistants' tokens are learned.

    A row has `messages`, a list of {"role", "content"}, or `prompt` (text or messages) and `response` or `completion`
    (text or messages). The whole conversation goes through the tokenizer's chat template at once. What an assistant
    writes begins where the template's generation prompt ends, and ends with the turn, its end token included.

    Args:
        files: Parquet, JSONL or JSON files, read in order.
        tokenizer: a fast one with a chat template, and a padding or an end-of-sequence token.
        max_length: limit of a conversation in tokens.
        overlong: what a longer one does: `error`, `drop`, or `truncate` at its end.
        max_samples: only the first rows, if it is not negative.
        apply_chat_template_kwargs: further arguments of the chat template.

    Attributes:
        num_dropped, num_truncated: rows that were too long.

    Raises:
        ValueError: files, rows, tokenizer or template that cannot be used; the message names file, row and field.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        overlong: str = "error",
        max_samples: int = -1,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.num_dropped = self.num_truncated = 0
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        """Token ids and the mask of those that are learned, of each row."""
        for place, record in read_records(files, max_samples):
            ids, learned = tokens_of(messages_of(record, place), tokenizer, apply_chat_template_kwargs or {}, place)
            if len(ids) > max_length:
                if overlong == "error":
                    raise ValueError(
                        f"{place}: the conversation has {len(ids)} tokens, more than data.max_length={max_length}: "
                        f"raise it, or set data.overlong=drop or truncate"
                    )
                self.num_dropped += overlong == "drop"
                self.num_truncated += overlong == "truncate"
                if overlong == "drop":
                    continue
                ids, learned = ids[:max_length], learned[:max_length]
            if not learned[1:].any():
                raise ValueError(
                    f"{place}: none of the {len(ids)} tokens is learned: the conversation has no assistant's text"
                    + (f" among its first data.max_length={max_length} tokens" if len(ids) == max_length else "")
                )
            self._rows.append((ids, learned))
        if not self._rows:
            raise ValueError(f"no conversation of {', '.join(files)} is left ({self.num_dropped} are too long)")

    def __len__(self) -> int:
        return len(self._rows)

    def collate(self, indices: Iterable[int]) -> DataProto:
        """A batch of B rows, padded on the right to the longest, T.

        Returns input_ids, attention_mask, position_ids (B, T) int64, and response_mask (B, T - 1), which says of every
        token but the first whether it is learned.
        """
        rows = [self._rows[index] for index in indices]
        length = max(2, max(len(ids) for ids, _ in rows))
        input_ids = np.full((len(rows), length), self.pad_token_id, dtype=np.int64)
        attention_mask, learned = np.zeros_like(input_ids), np.zeros_like(input_ids)
        for row, (ids, mask) in enumerate(rows):
            input_ids[row, : len(ids)], attention_mask[row, : len(ids)], learned[row, : len(ids)] = ids, 1, mask
        position_ids = np.maximum(attention_mask.cumsum(axis=1) - 1, 0)
        columns = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        columns["response_mask"] = learned[:, 1:]
        return DataProto.from_dict({name: torch.from_numpy(array) for name, array in columns.items()})


def messages_of(record: Any, place: str) -> list[Message]:
    """The messages of a row. Raises ValueError for a row of another form."""
    if not isinstance(record, dict):
        raise bad_row(place, "the row", record, "an object with named fields")
    if record.get("messages") is not None:
        turns = [("messages", record["messages"], "user")]
    else:
        answer = "response" if record.get("response") is not None else "completion"
        turns = [("prompt", record.get("prompt"), "user"), (answer, record.get(answer), "assistant")]
    messages: list[Message] = []
    for field, value, role in turns:
        said = [{"role": role, "content": value}] if isinstance(value, str) and field != "messages" else value
        if not isinstance(said, list) or not said:
            raise bad_row(
                place, f"field {field!r}", value, f"chat messages; the row has {', '.join(record)}, expected messages, "
                "or prompt and response"
            )  # fmt: skip
        for position, message in enumerate(said):
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise bad_row(place, f"field {field}[{position}]", message, '{"role": "user", "content": "..."}')
            messages.append({key: text for key, text in message.items() if text is not None})
    return messages


def tokens_of(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], place: str
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (T,) int64 of the conversation, and which of them (T,) bool an assistant writes.

    Raises ValueError where the template changes earlier turns by later ones, or fails.
    """

    def render(count: int, **further: Any) -> str:
        try:
            some: Any = list(messages[:count])
            return str(tokenizer.apply_chat_template(some, tokenize=False, **template_kwargs, **further))
        except Exception as error:  # a template may raise anything; the error names the row
            raise ValueError(
                f"{place}: the chat template of the tokenizer {tokenizer.name_or_path!r} fails on roles "
                f"{[message['role'] for message in messages[:count]]}: {type(error).__name__}: {error}"
            ) from error

    text, spans = render(len(messages)), []
    for count, message in enumerate(messages):
        if message["role"] == "assistant":
            begun, ended = render(count, add_generation_prompt=True), render(count + 1)
            if not (text.startswith(ended) and ended.startswith(begun)):
                raise ValueError(
                    f"{place}: the chat template writes turn {count} in another way when later turns follow, or not "
                    "after its generation prompt, so its tokens in the conversation are not those that the model would "
                    "write; give the turns as rows of their own"
                )
            spans.append((len(begun), len(ended)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A character belongs to an assistant where more of their texts have begun than ended.
    change = np.zeros(len(text) + 1, dtype=np.int64)
    for begin, end in spans:
        change[begin] += 1
        change[end] -= 1
    is_learned = np.array(list(accumulate(change.tolist())), dtype=bool)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    learned = is_learned[offsets[:, 0]] & (offsets[:, 1] > offsets[:, 0])
    return np.array(encoded["input_ids"], dtype=np.int64), learned
