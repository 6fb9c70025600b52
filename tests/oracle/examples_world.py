"""What training on examples starts from: conversations, pairs of answers, and the template that
joins their turns.

Imports nothing from `verl_like`.
"""

from typing import Any

import step_world as world

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ mark | default('=') if m['role'] == 'user' "
    "else '<eos>' }}{% endfor %}"
)
"""A user's turn ends with a mark, and an assistant's with the end-of-sequence token."""


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# The sixth is longer than the others, and of the last nothing that is learned is cut.
TALKS: list[dict[str, Any]] = [
    {"prompt": "1+2", "response": "3", "score": 1.5},
    {"messages": turns("a", "bc", "d", "e"), "score": -0.5},
    {"text": "x+y-z", "score": 0.25},
    {"prompt": turns("7-3"), "completion": turns("", "4")[1:], "score": 2},
    {"messages": turns("0", "no", "9"), "score": -1.0},
    {"prompt": "12", "response": "tenandtwo", "score": 3.0},
    {"text": "42", "score": 0.75},
]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "1+2", "chosen": "3", "rejected": "4", "margin": 0.5},
    {"prompt": "a", "chosen": "bcd", "rejected": "e"},
    {"prompt": turns("x", "y", "z"), "chosen": "q", "rejected": turns("", "rs")[1:], "margin": -1},
    {"chosen": turns("7", "8"), "rejected": turns("7", "9+0")},
    {"prompt": "no", "chosen": "yes", "rejected": "b", "margin": 0.25},
    {"prompt": "12", "chosen": "tenandtwo", "rejected": "t"},
    {"prompt": "m-n", "chosen": "o", "rejected": "pq", "margin": 2},
]

Tokens = tuple[list[int], list[bool]]
"""Token ids, and of each whether it is learned."""


def tokens_of_turns(messages: list[dict[str, str]], first: int, mark: str) -> Tokens:
    """A conversation whose assistants are learned from message `first` on."""
    ids: list[int] = []
    learned: list[bool] = []
    for number, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        own = world.encode(message["content"]) + ([world.EOS] if is_answer else world.encode(mark))
        ids += own
        learned += [is_answer and number >= first] * len(own)
    return ids, learned


def tokens_of_talk(row: dict[str, Any], mark: str) -> Tokens:
    if "text" in row:
        ids = [*world.encode(row["text"]), world.EOS]
        return ids, [True] * len(ids)
    if "messages" in row:
        return tokens_of_turns(row["messages"], 0, mark)
    prompt = as_turns(row["prompt"], "user")
    return tokens_of_turns(
        prompt + as_turns(row.get("response") or row["completion"], "assistant"), len(prompt), mark
    )


def tokens_of_pair(row: dict[str, Any], mark: str) -> list[Tokens]:
    """The chosen and the rejected conversation."""
    prompt = as_turns(row["prompt"], "user") if "prompt" in row else []
    sides = [prompt + as_turns(row[side], "assistant") for side in ("chosen", "rejected")]
    num_alike = next(i for i, (one, other) in enumerate(zip(*sides, strict=False)) if one != other)
    return [tokens_of_turns(side, num_alike, mark) for side in sides]


def as_turns(said: str | list[dict[str, str]], role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said
