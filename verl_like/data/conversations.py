"""Conversations to learn from, tokenised once, with the tokens that the model is to write
marked."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.data.rows import (
    bad_row,
    check_messages,
    padding_token,
    read_records,
    render,
    require_characters,
)
from verl_like.data.token_limit import TokenLimit
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists

Message = Mapping[str, Any]
Tokens = tuple[np.ndarray, np.ndarray]
"""Token ids (T,) int64 of a conversation, and which of them (T,) bool are learned."""


class OverlongText(ValueError):
    """A text that has more tokens than `data.max_length`, by its characters alone."""


class ConversationDataset:
    """Rows of chat messages as token ids, none longer than `max_length`, of which assistants'
    tokens are learned.

    A row has `messages`, a list of {"role", "content"}, or `prompt` (text or messages) and
    `response` or `completion` (text or messages), of which the latter is learned. The whole
    conversation goes through the tokenizer's chat template at once. What an assistant writes begins
    where the template's generation prompt ends, and ends with the turn, its end token included. No
    token spans these places, so that the tokens before an answer are those of a prompt. Or a row
    has `text`, which goes through no template and is learned as a whole, from its second token on,
    and gets an end-of-sequence token behind it.

    Args:
        files: Parquet, JSONL or JSON files, read in order.
        tokenizer: has a chat template, and a padding or an end-of-sequence token.
        max_length: limit of a conversation in tokens.
        overlong: what a longer one does: `error`, `drop`, or `truncate` at its end.
        max_samples: only the first rows, if it is not negative.
        apply_chat_template_kwargs: further arguments of the chat template.
        end_tokens: further ones with which a response may end, besides the tokenizer's.

    Attributes:
        num_dropped, num_truncated: rows that were too long.
        longest, largest: tokens of the longest conversation, and of the row with the most, and
            where they are from.
        highest_token: the highest token id, and where it is from.
        last_tokens: with which the conversations end.
        learns_to_end: whether a token with which a response ends is learned in any row.

    Raises:
        ValueError: files, rows, tokenizer or template that cannot be used; the message names file,
            row and field.
    """

    what = "conversation"
    """What a row is, for messages."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        overlong: str = "error",
        max_samples: int = -1,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        end_tokens: Collection[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = apply_chat_template_kwargs or {}
        self.end_tokens = [
            token for token in (tokenizer.eos_token_id, *end_tokens) if token is not None
        ]
        self.pad_token_id = padding_token(tokenizer)
        # Where a longer conversation is cut, its tokens are needed.
        self.limit = None if overlong == "truncate" else TokenLimit(tokenizer, max_length)
        self.num_dropped = self.num_truncated = 0
        self.longest = self.largest = self.highest_token = (0, "")
        self.last_tokens: set[int] = set()
        self.learns_to_end = False
        self._rows: list[tuple[list[Tokens], dict[str, float]]] = []
        for place, record in read_records(files, max_samples):
            try:
                row, columns = self.read(record, place)
            except OverlongText:
                if overlong == "error":
                    raise
                self.num_dropped += 1
                continue
            length = max(len(ids) for ids, _ in row)
            if length > max_length:
                if overlong == "error":
                    raise ValueError(
                        f"{place}: the conversation has {length} tokens, more than "
                        f"data.max_length={max_length}: raise it, or set data.overlong=drop or "
                        "truncate"
                    )
                self.num_dropped += overlong == "drop"
                self.num_truncated += overlong == "truncate"
                if overlong == "drop":
                    continue
                row = [(ids[:max_length], learned[:max_length]) for ids, learned in row]
            self.check(row, place, f" among its first {max_length} tokens" * (length > max_length))
            lengths = [len(ids) for ids, _ in row]
            self.longest = max(self.longest, (max(lengths), place))
            self.largest = max(self.largest, (sum(lengths), place))
            self.highest_token = max(
                self.highest_token, (max(int(ids.max()) for ids, _ in row), place)
            )
            self.last_tokens |= {int(ids[-1]) for ids, _ in row}
            self.learns_to_end |= any(
                np.isin(ids[learned], self.end_tokens).any() for ids, learned in row
            )
            self._rows.append((row, columns))
        if not self._rows:
            raise ValueError(
                f"no {self.what} of {', '.join(files)} is left ({self.num_dropped} are too long)"
            )

    def read(self, record: Any, place: str) -> tuple[list[Tokens], dict[str, float]]:
        """The conversations of a row, and its further columns. Raises ValueError for one that
        cannot be used."""
        has_no_turns = (
            isinstance(record, dict) and not record.get("messages") and not record.get("prompt")
        )
        if has_no_turns and isinstance(record.get("text"), str):
            text = require_characters(record["text"], "field 'text'", place)
            require_room(text, self.limit, place)
            tokens = list(self.tokenizer(text)["input_ids"])
            end = self.tokenizer.eos_token_id
            if end is None:
                raise ValueError(
                    f"{place}: field 'text' ends with an end-of-sequence token, which the "
                    f"tokenizer {self.tokenizer.name_or_path!r} does not have: name its "
                    "eos_token, or give messages"
                )
            if tokens[-1:] != [end]:
                tokens.append(end)
            ids = np.array(tokens, dtype=np.int64)
            return [(ids, np.ones_like(ids, dtype=bool))], {}
        messages, first = messages_of(record, place)
        return [
            tokens_of(messages, first, self.tokenizer, self.template_kwargs, place, self.limit)
        ], {}

    def check(self, row: Sequence[Tokens], place: str, where: str) -> None:
        """Raises ValueError where nothing of the row, after it was cut, is learned; `where` says if
        it was."""
        for ids, learned in row:
            if not learned[1:].any():
                raise ValueError(
                    f"{place}: none of the {len(ids)} tokens is learned: the row has no text of an "
                    "assistant" + where
                )

    def __len__(self) -> int:
        return len(self._rows)

    def token_ids(self, index: int) -> list[np.ndarray]:
        """The tokens of each conversation of an example."""
        return [ids for ids, _ in self._rows[index][0]]

    def collate(self, indices: Iterable[int]) -> DataProto:
        """A batch of the conversations of B examples, those of an example one after the other.

        Of each conversation the first token is in `prompts`, the others are in `responses`, jagged
        int64, and `response_mask` says which of them are learned. `sample_id` (rows,) int64 numbers
        the examples, and the further columns are (rows,) float32. Padded, a response is as wide as
        the longest of the batch.
        """
        examples = [self._rows[index] for index in indices]
        conversations = [conversation for row, _ in examples for conversation in row]
        num_of_each = torch.tensor([len(row) for row, _ in examples], dtype=torch.int64)
        tensors = {
            "prompts": jagged_from_lists([ids[:1] for ids, _ in conversations], torch.int64),
            "responses": jagged_from_lists([ids[1:] for ids, _ in conversations], torch.int64),
            "response_mask": jagged_from_lists(
                [learned[1:] for _, learned in conversations], torch.int64
            ),
            "sample_id": torch.arange(len(examples)).repeat_interleave(num_of_each),
        }
        for name in examples[0][1] if examples else ():
            values = torch.tensor([further[name] for _, further in examples])
            tensors[name] = values.repeat_interleave(num_of_each)
        longest = max((len(ids) for ids, _ in conversations), default=2)
        return DataProto.from_dict(
            tensors, meta_info={"padding": (1, max(1, longest - 1), self.pad_token_id)}
        )


class ScoredDataset(ConversationDataset):
    """Rows of `ConversationDataset` with a further field `score`, a finite number."""

    what = "scored conversation"

    def read(self, record: Any, place: str) -> tuple[list[Tokens], dict[str, float]]:
        conversations, _ = super().read(record, place)
        score = record.get("score")
        if type(score) not in (int, float) or not abs(score) < 1e30:  # of NaN too
            raise bad_row(place, "field 'score'", score, "a finite number")
        return conversations, {"score": float(score)}


def require_room(text: str, limit: TokenLimit | None, place: str) -> None:
    """Raises OverlongText for a text that has more tokens than the limit, by its characters
    alone."""
    if limit and limit.is_exceeded(text):
        raise OverlongText(
            f"{place}: the conversation is longer than data.max_length={limit.max_tokens}: it has "
            f"{limit.reason(text)}; raise it, or set data.overlong=drop or truncate"
        )


def messages_of(record: Any, place: str) -> tuple[list[Message], int]:
    """The messages of a row, and from which on they are learned. Raises ValueError for a row of
    another form."""
    expected = "messages, prompt and response, or text"
    if isinstance(record, dict) and record.get("messages") is not None:
        return messages_in(record, "messages", None, place, expected), 0
    answer = (
        "response"
        if isinstance(record, dict) and record.get("response") is not None
        else "completion"
    )
    prompt = messages_in(record, "prompt", "user", place, expected)
    return prompt + messages_in(record, answer, "assistant", place, expected), len(prompt)


def messages_in(
    record: Any, field: str, role: str | None, place: str, expected: str
) -> list[Message]:
    """The messages of a field, of which a text is one of `role`. Raises ValueError for anything
    else."""
    if not isinstance(record, dict):
        raise bad_row(place, "the row", record, "an object with named fields")
    if record.get("tools"):
        expected = (
            "none, since no template gets it: data.apply_chat_template_kwargs.tools is "
            "given for all rows"
        )
        raise bad_row(place, "field 'tools'", record["tools"], expected)
    value = record.get(field)
    said = [{"role": role, "content": value}] if isinstance(value, str) and role else value
    if not isinstance(said, list) or not said:
        raise bad_row(
            place,
            f"field {field!r}",
            value,
            f"chat messages; the row has {', '.join(record)}, expected {expected}",
        )
    return list(check_messages(said, field, place))


def tokens_of(
    messages: Sequence[Message],
    first: int,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    place: str,
    limit: TokenLimit | None = None,
) -> Tokens:
    """The conversation, of which is learned what an assistant writes in messages from `first` on.

    Raises ValueError for an empty turn or one without a turn before it, and where the template
    changes earlier turns by later ones, or fails; OverlongText for what has more tokens than
    `limit` by its characters alone.
    """
    text = render(tokenizer, messages, place, template_kwargs)
    pieces = []
    require_room(text, limit, place)
    for count, message in enumerate(messages):
        if message["role"] == "assistant" and count >= first:
            if not count or not (message["content"].strip() or message.get("tool_calls")):
                why = "is empty" if count else "answers nothing"
                raise ValueError(
                    f"{place}: turn {count}, the assistant's, {why}; leave it out, or the row"
                )
            begun = render(
                tokenizer,
                messages[:count],
                place,
                {**template_kwargs, "add_generation_prompt": True},
            )
            ended = render(tokenizer, messages[: count + 1], place, template_kwargs)
            if not (text.startswith(ended) and ended.startswith(begun)):
                raise ValueError(
                    f"{place}: the chat template writes turn {count} in another way when later "
                    "turns follow, or not after its generation prompt, so its tokens in the "
                    "conversation are not those that the model would write; give the turns as "
                    "rows of their own"
                )
            pieces += [(len(begun), False), (len(ended), True)]
    ids = []
    learned = []
    before = 0
    begin = 0
    for end, is_learned in [*pieces, (len(text), False)]:
        if end > begin:
            texts = [text[before:begin], text[before:end], text[begin:end]]
            previous, both, own = tokenizer(texts, add_special_tokens=False)["input_ids"]
            if both[: len(previous)] == previous:
                own = both[len(previous) :]
            elif tokenizer.decode(previous + own) != tokenizer.decode(both):
                raise ValueError(
                    f"{place}: a token spans character {begin} of the conversation, where what is "
                    "learned begins or ends, and the tokenizer reads the text behind it in "
                    "another way when it begins there; change the space around it in the row or "
                    "the chat template"
                )
            ids += own
            learned += [is_learned] * len(own)
            before = begin
            begin = end
    return np.array(ids, dtype=np.int64), np.array(learned, dtype=bool)
