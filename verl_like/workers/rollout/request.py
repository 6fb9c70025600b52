"""A generation request, the response to it, and a check of the response."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VersionSpan = tuple[int, int, int]
"""(version, start, end): the weights of `version` drew tokens start to end - 1 of a response."""


class RolloutError(RuntimeError):
    """The engine returned something that is not a response to its prompt."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a response are drawn.

    Greedy decoding has temperature 0; its log-probabilities are those of temperature 1.
    """

    temperature: float
    top_k: int
    """-1 means all tokens."""
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and belong to it. If empty, each response has `max_tokens`."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to draw."""

    name: str
    """A name that no other unfinished request has."""
    prompt_ids: Sequence[int]
    seed: int
    """The only source of randomness of the response."""
    sampling: Sampling
    uid: str = ""
    """The uid of its prompt in the batch."""
    index: int = 0
    """The number of this response among those to the prompt."""
    episode: str = ""
    """The name of the episode that makes this request, if one does."""


@dataclass(frozen=True, eq=False)
class Completion:
    """The response to a request: its tokens and their log-probabilities.

    The last token may be a stop token. Lists that are passed in become arrays. Raises RolloutError
    for token ids that are not integers.
    """

    token_ids: np.ndarray
    """(length,) int64."""
    log_probs: np.ndarray
    """(length,) float32."""
    versions: tuple[VersionSpan, ...]
    """Which weights drew which tokens: consecutive spans from the first token to the last."""
    num_cached_tokens: int = 0
    """How many tokens of its prompt were taken from the prefix cache instead of computed."""
    routed_experts: np.ndarray | None = None
    """The experts of each token, (tokens of prompt and response, layers, experts of a token), as in
    the column of the batch. None if they are not recorded."""

    def __post_init__(self) -> None:
        token_ids = np.asarray(self.token_ids)
        if token_ids.size and token_ids.dtype.kind not in "iu":
            raise RolloutError(
                "A response has token ids that are no whole numbers of 64 bits: "
                f"{token_ids.tolist()}."
            )
        log_probs = np.asarray(self.log_probs, np.float32)
        token_ids = token_ids.astype(np.int64, copy=False)
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "log_probs", log_probs)


NamedCompletion = tuple[str, Completion]
"""The name of a request, and the response to it."""
FinishedRequest = tuple[GenerationRequest, Completion]
"""A request and its response. Other responses of the batch may still be unfinished."""


def request_seed(seed: int, step: int, validate: bool, uid: str, sample: int) -> int:
    """Returns the seed of one response, an integer of 63 bits.

    Equal arguments give equal seeds in every process; different ones give unrelated seeds.
    """
    key = repr((seed, step, validate, uid, sample))
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def check_completion(
    completion: Completion, who: str, sampling: Sampling, *, vocab_size: int
) -> None:
    """Checks a response, and raises RolloutError if an engine cannot have drawn it.

    A valid response has 1 to `sampling.max_tokens` tokens of the vocabulary, and ends with a stop
    token if it is shorter. Each token has a finite log-probability and belongs to one span of
    versions. `who` names the response in the error.
    """
    length = len(completion.token_ids)
    if not 1 <= length <= sampling.max_tokens:
        raise RolloutError(
            f"{who} has {length} tokens, but 1 to {sampling.max_tokens} are possible."
        )
    token_ids = completion.token_ids
    if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise RolloutError(
            f"{who} has tokens outside of the vocabulary of {vocab_size}: {token_ids.tolist()}."
        )
    if length < sampling.max_tokens and token_ids[-1] not in sampling.stop_token_ids:
        raise RolloutError(
            f"{who} stops after {length} of {sampling.max_tokens} tokens at token "
            f"{token_ids[-1]}, which does not end a response (those that do: "
            f"{sampling.stop_token_ids})."
        )
    log_probs = completion.log_probs
    if len(log_probs) != length or not np.isfinite(log_probs).all():
        raise RolloutError(f"{who} has {length} tokens but log-probabilities {log_probs.tolist()}.")
    num_covered = 0
    are_consecutive = True
    for _version, start, end in completion.versions:
        if start != num_covered or end <= start:
            are_consecutive = False
        num_covered = end
    if not are_consecutive or num_covered != length:
        raise RolloutError(
            f"{who} has {length} tokens but spans of versions {completion.versions}."
        )
