"""A generation request, what comes of it, and the check of that."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VersionSpan = tuple[int, int, int]
"""(version, start, end): the weights of `version` drew the response's tokens start to end - 1."""


class RolloutError(RuntimeError):
    """The engine returned something that is not a response to its prompt."""


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn. Greedy decoding has temperature 0; its log-probabilities are those
    of temperature 1."""

    temperature: float
    top_k: int
    """-1 means all tokens."""
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and belong to it; empty means that every response has `max_tokens`
    tokens."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to draw."""

    name: str
    """Unlike that of every other request in flight."""
    prompt_ids: Sequence[int]
    seed: int
    """All randomness of the response."""
    sampling: Sampling
    uid: str = ""
    """Of its prompt in the batch."""
    index: int = 0
    """Among the responses to the prompt."""


@dataclass(frozen=True, eq=False)
class Completion:
    """The response to a request: its tokens, the last of which may be a stop token, and their
    log-probabilities.

    Lists of tokens and log-probabilities become arrays.
    """

    token_ids: np.ndarray
    """(length,) int64."""
    log_probs: np.ndarray
    """(length,) float32."""
    versions: tuple[VersionSpan, ...]
    """Spans that follow each other from the first token to the last."""
    num_cached_tokens: int = 0
    """Tokens of its prompt that were not computed for it, because the prefix cache had them."""

    def __post_init__(self) -> None:
        token_ids = np.asarray(self.token_ids)
        if token_ids.size and token_ids.dtype.kind not in "iu":
            raise RolloutError(
                "A response has token ids that are no whole numbers of 64 bits: "
                f"{token_ids.tolist()}."
            )
        object.__setattr__(self, "token_ids", token_ids.astype(np.int64, copy=False))
        object.__setattr__(self, "log_probs", np.asarray(self.log_probs, np.float32))


FinishedRequest = tuple[GenerationRequest, Completion]
"""A request and its response, while others of the same batch may still be drawn."""


def request_seed(seed: int, step: int, validate: bool, uid: str, sample: int) -> int:
    """The seed of one response, 63 bits: the same for the same arguments in every process,
    unrelated for others."""
    key = repr((seed, step, validate, uid, sample)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def check_completion(
    completion: Completion, who: str, sampling: Sampling, *, vocab_size: int
) -> None:
    """Raises RolloutError, which says `who`, unless it is 1 to R known tokens with finite
    log-probabilities and a version each."""
    length = len(completion.token_ids)
    if not 1 <= length <= sampling.max_tokens:
        raise RolloutError(
            f"{who} has {length} tokens, but 1 to {sampling.max_tokens} are possible."
        )
    if not 0 <= completion.token_ids.min() <= completion.token_ids.max() < vocab_size:
        token_ids = completion.token_ids.tolist()
        raise RolloutError(
            f"{who} has tokens outside of the vocabulary of {vocab_size}: {token_ids}."
        )
    if length < sampling.max_tokens and completion.token_ids[-1] not in sampling.stop_token_ids:
        raise RolloutError(
            f"{who} stops after {length} of {sampling.max_tokens} tokens at token "
            f"{completion.token_ids[-1]}, which does not end a response (those that do: "
            f"{sampling.stop_token_ids})."
        )
    if len(completion.log_probs) != length or not np.isfinite(completion.log_probs).all():
        raise RolloutError(
            f"{who} has {length} tokens but log-probabilities {completion.log_probs.tolist()}."
        )
    starts = [start for _, start, _ in completion.versions]
    ends = [end for _, _, end in completion.versions]
    if (
        starts != [0, *ends[:-1]]
        or ends[-1] != length
        or any(start >= end for _, start, end in completion.versions)
    ):
        raise RolloutError(
            f"{who} has {length} tokens but spans of versions {completion.versions}."
        )
