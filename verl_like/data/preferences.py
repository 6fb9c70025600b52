"""Pairs of answers to one prompt, of which one is preferred."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from verl_like.data.conversations import ConversationDataset, Tokens, messages_in, tokens_of
from verl_like.data.rows import bad_row

_EXPECTED = "chosen and rejected, with prompt or as conversations that begin alike"


class PreferenceDataset(ConversationDataset):
    """Rows of two conversations, chosen and rejected, that begin with the same messages, the
    prompt.

    A row has `prompt`, `chosen` and `rejected` (texts or messages), or `chosen` and `rejected` as
    whole conversations; and it may have `margin`, by which the reward of the chosen answer should
    be the greater. What assistants write after the prompt is learned. What the template writes
    behind the last of `end_tokens` is left out, so that the conversation ends as a response that
    was generated does.

    Arguments, attributes and errors are those of `ConversationDataset`; a pair is also refused if
    an answer is empty, or both are the same.
    """

    what = "pair"

    def read(self, record: Any, place: str) -> tuple[list[Tokens], dict[str, float]]:
        has_prompt = isinstance(record, dict) and record.get("prompt") is not None
        prompt = messages_in(record, "prompt", "user", place, _EXPECTED) if has_prompt else []
        answers = {
            side: messages_in(record, side, "assistant", place, _EXPECTED)
            for side in ("chosen", "rejected")
        }
        for side, messages in answers.items():
            if messages[0]["role"] == "assistant":
                answers[side] = [*prompt, *messages]
            elif messages[: len(prompt)] != prompt:
                raise ValueError(
                    f"{place}: {side} is a conversation that does not begin with the messages of "
                    "prompt"
                )
        alike = takewhile(
            lambda messages: messages[0] == messages[1], zip(*answers.values(), strict=False)
        )
        num_alike = sum(1 for _ in alike)
        if not num_alike:
            raise ValueError(
                f"{place}: chosen and rejected begin with different messages: give them one prompt"
            )
        if answers["chosen"] == answers["rejected"]:
            raise ValueError(
                f"{place}: chosen and rejected are the same: such a pair prefers nothing; leave it "
                "out"
            )
        margin = 0.0 if record.get("margin") is None else record["margin"]
        if type(margin) not in (int, float) or not math.isfinite(margin):
            raise bad_row(place, "field 'margin'", margin, "a number, or no such field")
        tokens = [
            self.without_tail(
                tokens_of(
                    messages, num_alike, self.tokenizer, self.template_kwargs, place, self.limit
                )
            )
            for messages in answers.values()
        ]
        return tokens, {"margin": float(margin)}

    def without_tail(self, tokens: Tokens) -> Tokens:
        """The conversation up to the last of `end_tokens`, unless text follows it."""
        ids, learned = tokens
        ends = np.flatnonzero(np.isin(ids, self.end_tokens))
        if len(ends) and not str(self.tokenizer.decode(ids[ends[-1] + 1 :])).strip():
            return ids[: ends[-1] + 1], learned[: ends[-1] + 1]
        return tokens

    def check(self, row: Sequence[Tokens], place: str, where: str) -> None:
        super().check(row, place, where)
        (chosen, _), (rejected, _) = row
        if np.array_equal(chosen, rejected):
            raise ValueError(
                f"{place}: chosen and rejected have the same {len(chosen)} tokens{where}"
            )
