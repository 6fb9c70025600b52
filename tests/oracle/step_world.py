"""What the code under test and the reference both start from: tiny models, prompts, and responses
of every kind.

Nothing here computes; both sides get these numbers as their input. Imports nothing from
`verl_like`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-="
PAD, EOS, FIRST = 0, 1, 2  # token ids: padding, end of sequence, the first character
VOCABULARY = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}

# In file order; the chat template adds "=". Their lengths differ.
PROMPTS = ["1+2", "a", "12+34", "7-3", "b+cd", "9", "x-yz", "0+0+0"]
TEXTS = ["1+2=3", "abc", "7-3", "x+y-z=0", "42", "12+34=46", "b=cd"]
LONGEST_PROMPT, LONGEST_RESPONSE = 6, 7

UNSCORED, BROKEN = "q", "w"
"""A response with one of these letters is left out by the reward function, or makes it fail."""

REWARD = f'''
def grade(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    if "{BROKEN}" in solution_str:
        raise ValueError("broken")
    return None if "{UNSCORED}" in solution_str else scale * (sum(map(ord, solution_str)) % 7 - 2)


def compute_score(*sample):
    return grade(*sample, scale=3.0)
'''


@dataclass(frozen=True)
class Response:
    """A sampled response. What `counts` leaves out is in the sequence but was not sampled, as a
    tool's output is."""

    token_ids: list[int]
    counts: list[bool]
    """Of each token, whether it is trained on; at least one is."""
    log_probs: list[float]
    """What the engine said of each token that counts; 0 of the others."""


def encode(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def prompt_tokens(number: int) -> list[int]:
    """Prompt `number` of the file, as the chat template makes it."""
    return encode(PROMPTS[number] + "=")


def response(prompt: Iterable[int], step: int, number: int) -> Response:
    """Response `number` to a prompt in a training step: 1 to `LONGEST_RESPONSE` tokens, some with
    holes."""
    generator = np.random.default_rng([step, number, *prompt])
    length = int(generator.integers(1, LONGEST_RESPONSE + 1))
    token_ids = generator.integers(FIRST, len(VOCABULARY), size=length).tolist()
    if length < LONGEST_RESPONSE:
        token_ids[-1] = EOS
    counts = (generator.random(length) < 0.8).tolist()
    counts[int(generator.integers(length))] = True
    log_probs = np.where(counts, generator.normal(-2.5, 0.5, length), 0.0).tolist()
    return Response(token_ids, counts, log_probs)


# By how much what a model computed before the update is shifted, so that it belongs to another
# policy, reference or critic: ratios then lie on both sides of every clip range, and KL terms are
# not zero.
SHIFTS = {"old_log_probs": (1.4, 0), "ref_log_prob": (0.5, 1), "values": (0.6, 2)}


def shift(column: str, row: int, position: int) -> float:
    """What is added to a column at a position of the response of a row of the batch."""
    size, phase = SHIFTS[column]
    return size * math.sin(3 * row + 5 * position + phase)
