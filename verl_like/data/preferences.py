"""Pairs of answers to one prompt, of which one is preferred."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_like.data.conversations import ConversationDataset, Row, Tokens, messages_in, tokens_of
from verl_like.data.rows import bad_row

_EXPECTED = "chosen and rejected, with prompt or as conversations that begin alike"


class PreferenceDataset(ConversationDataset):
    """Rows with two conversations, chosen and rejected. Both begin with the same messages, which
    are the prompt.

    A row has `prompt`, `chosen` and `rejected` (texts or messages), or `chosen` and `rejected` as
    whole conversations. It may have `margin`, by which the reward of the chosen answer should be
    greater than that of the rejected one. What assistants write after the prompt is learned. What
    the template writes after the last of `end_tokens` is left out, so that the conversation ends
    like a generated response.

    Arguments, attributes and errors are those of `ConversationDataset`. A pair is also refused if
    an answer is empty, or both are the same.
    """

    what = "pair"

    def read(self, record: dict[str, Any], place: str) -> Row:
        """Returns the chosen and the rejected conversation of a row, and the column `margin`, which
        is 0 if the row has none. Raises ValueError for a row that cannot be used."""
        prompt = []
        if record.get("prompt") is not None:
            prompt = messages_in(record, "prompt", "user", place, _EXPECTED)
        answers = {
            side: messages_in(record, side, "assistant", place, _EXPECTED)
            for side in ("chosen", "rejected")
        }
        for side, messages in answers.items():
            if messages[0]["role"] == "assistant":
                answers[side] = prompt + messages
            elif messages[: len(prompt)] != prompt:
                raise ValueError(
                    f"{place}: {side} is a conversation that does not begin with the messages of "
                    "prompt"
                )
        num_alike = 0  # the number of first messages that are the same
        for chosen, rejected in zip(answers["chosen"], answers["rejected"], strict=False):
            if chosen != rejected:
                break
            num_alike += 1
        if not num_alike:
            raise ValueError(
                f"{place}: chosen and rejected begin with different messages: give them one prompt"
            )
        if answers["chosen"] == answers["rejected"]:
            raise ValueError(
                f"{place}: chosen and rejected are the same: such a pair prefers nothing; leave it "
                "out"
            )
        margin = record.get("margin")
        if margin is None:
            margin = 0.0
        if type(margin) not in (int, float) or not math.isfinite(margin):
            raise bad_row(place, "field 'margin'", margin, "a number, or no such field")
        row = []
        for messages in answers.values():
            tokens = tokens_of(
                messages, num_alike, self.tokenizer, self.template_kwargs, place, self.limit
            )
            row.append(self.without_tail(tokens))
        return row, {"margin": float(margin)}

    def without_tail(self, tokens: Tokens) -> Tokens:
        """Returns the conversation up to the last of `end_tokens`. A conversation without any of
        them, or with text other than white space after the last, is returned as it is."""
        ids, learned = tokens
        ends = np.flatnonzero(np.isin(ids, self.end_tokens))
        if not len(ends):
            return tokens
        stop = ends[-1] + 1
        tail = str(self.tokenizer.decode(ids[stop:]))
        if tail.strip():
            return tokens
        return ids[:stop], learned[:stop]

    def check(self, row: Sequence[Tokens], place: str, where: str) -> None:
        """Raises ValueError if no token of a conversation is learned, or if both have the same
        tokens, for instance because they were cut."""
        super().check(row, place, where)
        (chosen, _), (rejected, _) = row
        if np.array_equal(chosen, rejected):
            raise ValueError(
                f"{place}: chosen and rejected have the same {len(chosen)} tokens{where}"
            )
