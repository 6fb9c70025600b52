"""Conversations to learn from. They are tokenised once, and the tokens that are learned are
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

Message = dict[str, Any]
Tokens = tuple[np.ndarray, np.ndarray]
"""The token ids of a conversation, (T,) int64, and which of them are learned, (T,) bool."""
Row = tuple[list[Tokens], dict[str, float]]
"""The conversations of an example, and its further columns."""


class OverlongText(ValueError):
    """A conversation has more tokens than `data.max_length`."""


class ConversationDataset:
    """Rows of chat messages as token ids, none longer than `max_length`. The tokens that an
    assistant writes are learned.

    A row has one of three forms:

    - `messages`, a list of {"role", "content"}. Each message of an assistant is learned.
    - `prompt` and `response` (or `completion`), each a text or messages. The response is learned.
    - `text`, which goes through no chat template. All of it but its first token is learned, and an
      end-of-sequence token after it.

    A conversation goes through the tokenizer's chat template as a whole. What an assistant writes
    begins where the template's generation prompt ends, and ends with the end token of the turn. No
    token spans these places, so the tokens before an answer are those of a prompt in generation.

    Args:
        files: Parquet, JSONL or JSON files, read in order.
        tokenizer: has a chat template, and a padding or an end-of-sequence token.
        max_length: the limit of a conversation in tokens.
        overlong: what is done with a longer one: `error`, `drop`, or `truncate` at its end.
        max_samples: the number of rows that are read. All are read if it is negative.
        apply_chat_template_kwargs: further arguments of the chat template.
        end_tokens: tokens with which a response may end, besides that of the tokenizer.

    Attributes:
        num_dropped, num_truncated: the numbers of rows that were dropped or truncated.
        longest: (number of tokens, place) of the longest conversation.
        largest: (number of tokens, place) of the row with the most tokens.
        highest_token: (token id, place) of the highest token id.
        last_tokens: the tokens with which conversations end.
        learns_to_end: True if a token with which a response ends is learned in any row.

    Raises:
        ValueError: files, rows, tokenizer or template cannot be used. The message names file, row
            and field.
    """

    what = "conversation"
    """What messages call a row."""

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
        self.end_tokens = list(end_tokens)
        if tokenizer.eos_token_id is not None:
            self.end_tokens.append(tokenizer.eos_token_id)
        self.pad_token_id = padding_token(tokenizer)
        # A conversation that will be truncated has to be tokenised anyway.
        self.limit = None if overlong == "truncate" else TokenLimit(tokenizer, max_length)
        self.num_dropped = 0
        self.num_truncated = 0
        self.longest = (0, "")
        self.largest = (0, "")
        self.highest_token = (0, "")
        self.last_tokens: set[int] = set()
        self.learns_to_end = False
        self._rows: list[Row] = []
        for place, record in read_records(files, max_samples):
            try:
                row, columns = self.read(record, place)
                length = max(len(ids) for ids, _ in row)
                if length > max_length and overlong != "truncate":
                    raise OverlongText(
                        f"{place}: the conversation has {length} tokens, more than "
                        f"data.max_length={max_length}: raise it, or set data.overlong=drop or "
                        "truncate"
                    )
            except OverlongText:
                if overlong == "error":
                    raise
                self.num_dropped += 1
                continue
            where = ""
            if length > max_length:
                self.num_truncated += 1
                row = [(ids[:max_length], learned[:max_length]) for ids, learned in row]
                where = f" among its first {max_length} tokens"
            self.check(row, place, where)
            lengths = [len(ids) for ids, _ in row]
            self.longest = max(self.longest, (max(lengths), place))
            self.largest = max(self.largest, (sum(lengths), place))
            for ids, learned in row:
                highest = int(ids.max())
                self.highest_token = max(self.highest_token, (highest, place))
                self.last_tokens.add(int(ids[-1]))
                is_end = np.isin(ids[learned], self.end_tokens)
                self.learns_to_end |= bool(is_end.any())
            self._rows.append((row, columns))
        if not self._rows:
            raise ValueError(
                f"no {self.what} of {', '.join(files)} is left ({self.num_dropped} are too long)"
            )

    def read(self, record: dict[str, Any], place: str) -> Row:
        """Returns the conversations of a row and its further columns. Here a row has one
        conversation and no further columns. Raises ValueError for a row that cannot be used."""
        text = record.get("text")
        if isinstance(text, str) and not record.get("messages") and not record.get("prompt"):
            require_characters(text, "field 'text'", place)
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
            learned = np.ones_like(ids, dtype=bool)
            return [(ids, learned)], {}
        messages, first = messages_of(record, place)
        conversation = tokens_of(
            messages, first, self.tokenizer, self.template_kwargs, place, self.limit
        )
        return [conversation], {}

    def check(self, row: Sequence[Tokens], place: str, where: str) -> None:
        """Raises ValueError if no token of a conversation is learned. If the row was cut, `where`
        is the part of the message that says so."""
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
        row, _columns = self._rows[index]
        return [ids for ids, _ in row]

    def collate(self, indices: Iterable[int]) -> DataProto:
        """Makes a batch of B examples. It has a row for each of their conversations, with those of
        an example next to each other.

        The first token of a conversation is in `prompts` and the others are in `responses`, both
        jagged int64. `response_mask` says which of the others are learned. `sample_id` (rows,)
        int64 numbers the examples, and further columns are (rows,) float32. If the batch is padded,
        responses are as wide as the longest of the batch.
        """
        examples = [self._rows[index] for index in indices]
        row_counts = []
        first = []
        others = []
        are_learned = []
        for row, _columns in examples:
            row_counts.append(len(row))
            for ids, learned in row:
                first.append(ids[:1])
                others.append(ids[1:])
                are_learned.append(learned[1:])
        num_of_each = torch.tensor(row_counts, dtype=torch.int64)
        tensors = {
            "prompts": jagged_from_lists(first, torch.int64),
            "responses": jagged_from_lists(others, torch.int64),
            "response_mask": jagged_from_lists(are_learned, torch.int64),
            "sample_id": torch.arange(len(examples)).repeat_interleave(num_of_each),
        }
        if examples:
            _row, columns_of_first = examples[0]
            for name in columns_of_first:
                values = [columns[name] for _, columns in examples]
                tensors[name] = torch.tensor(values).repeat_interleave(num_of_each)
        lengths = [len(ids) for ids in others]
        padding = (1, max([1, *lengths]), self.pad_token_id)
        return DataProto.from_dict(tensors, meta_info={"padding": padding})


class ScoredDataset(ConversationDataset):
    """Rows of `ConversationDataset` with a further field `score`, a finite number."""

    what = "scored conversation"

    def read(self, record: dict[str, Any], place: str) -> Row:
        conversations, _ = super().read(record, place)
        score: Any = record.get("score")
        if type(score) not in (int, float) or not abs(score) < 1e30:  # NaN is not below it either
            raise bad_row(place, "field 'score'", score, "a finite number")
        return conversations, {"score": float(score)}


def require_room(text: str, limit: TokenLimit | None, place: str) -> None:
    """Raises OverlongText if a text has so many characters that it has more tokens than the
    limit."""
    if limit and limit.is_exceeded(text):
        raise OverlongText(
            f"{place}: the conversation is longer than data.max_length={limit.max_tokens}: it has "
            f"{limit.reason(text)}; raise it, or set data.overlong=drop or truncate"
        )


def messages_of(record: dict[str, Any], place: str) -> tuple[list[Message], int]:
    """Returns the messages of a row, and the index of the first one that may be learned. Raises
    ValueError for a row of another form."""
    expected = "messages, prompt and response, or text"
    if record.get("messages") is not None:
        return messages_in(record, "messages", None, place, expected), 0
    has_response = record.get("response") is not None
    field = "response" if has_response else "completion"
    prompt = messages_in(record, "prompt", "user", place, expected)
    answer = messages_in(record, field, "assistant", place, expected)
    return prompt + answer, len(prompt)


def messages_in(
    record: dict[str, Any], field: str, role: str | None, place: str, expected: str
) -> list[Message]:
    """Returns the messages in a field of a row. A text counts as one message of `role`, unless
    `role` is None. Raises ValueError, which says what was `expected`, for anything else."""
    if record.get("tools"):
        expected = (
            "none, since no template gets it: data.apply_chat_template_kwargs.tools is "
            "given for all rows"
        )
        raise bad_row(place, "field 'tools'", record["tools"], expected)
    value = record.get(field)
    if isinstance(value, str) and role:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        expected = f"chat messages; the row has {', '.join(record)}, expected {expected}"
        raise bad_row(place, f"field {field!r}", value, expected)
    return check_messages(value, field, place)


def tokens_of(
    messages: Sequence[Message],
    first: int,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    place: str,
    limit: TokenLimit | None = None,
) -> Tokens:
    """Returns the tokens of a conversation. What assistants write in messages from `first` on is
    learned.

    The text of the whole conversation is divided into pieces that are learned and pieces that are
    not. Each piece is tokenised so that no token spans two of them.

    Raises ValueError for an empty turn of an assistant and for one without a turn before it. Raises
    it too if the template fails, or writes earlier turns in another way when later ones follow.
    Raises OverlongText if the text has so many characters that it has more tokens than `limit`.
    """
    text = render(tokenizer, messages, place, template_kwargs)
    require_room(text, limit, place)
    ends_of_pieces = []  # (end, True if the piece is learned)
    for count, message in enumerate(messages):
        if message["role"] != "assistant" or count < first:
            continue
        is_empty = not (message["content"].strip() or message.get("tool_calls"))
        if not count or is_empty:
            why = "is empty" if count else "answers nothing"
            raise ValueError(
                f"{place}: turn {count}, the assistant's, {why}; leave it out, or the row"
            )
        with_generation_prompt = {**template_kwargs, "add_generation_prompt": True}
        begun = render(tokenizer, messages[:count], place, with_generation_prompt)
        ended = render(tokenizer, messages[: count + 1], place, template_kwargs)
        if not (text.startswith(ended) and ended.startswith(begun)):
            raise ValueError(
                f"{place}: the chat template writes turn {count} in another way when later "
                "turns follow, or not after its generation prompt, so its tokens in the "
                "conversation are not those that the model would write; give the turns as "
                "rows of their own"
            )
        ends_of_pieces.append((len(begun), False))
        ends_of_pieces.append((len(ended), True))
    ends_of_pieces.append((len(text), False))
    ids = []
    learned = []
    before = 0  # where the previous piece begins
    begin = 0
    for end, is_learned in ends_of_pieces:
        if end <= begin:
            continue
        texts = [text[before:begin], text[before:end], text[begin:end]]
        previous, both, own = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if both[: len(previous)] == previous:
            # After the previous piece, a piece can have other tokens than by itself.
            own = both[len(previous) :]
        elif tokenizer.decode(previous + own) != tokenizer.decode(both):
            raise ValueError(
                f"{place}: a token spans character {begin} of the conversation, where what is "
                "learned begins or ends, and the tokenizer reads the text behind it in "
                "another way when it begins there; change the space around it in the row or "
                "the chat template"
            )
        ids.extend(own)
        learned.extend([is_learned] * len(own))
        before = begin
        begin = end
    return np.array(ids, dtype=np.int64), np.array(learned, dtype=bool)
