"""An episode's access to the model: its seeds, its limits, and the record of its calls."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from verl_like.workers.agents.episode import (
    EpisodeFailed,
    EpisodeSpec,
    FinishedRow,
    RewardProblem,
    RoomUsedUp,
    Row,
    TokenIds,
)
from verl_like.workers.agents.turns import Turn
from verl_like.workers.models.routed_experts import OWN
from verl_like.workers.rollout.request import Completion, GenerationRequest

LARGEST_REWARD = float(np.finfo(np.float32).max)
FindStop = Callable[[list[int], bool], tuple[int, str | None]]
"""Gets the tokens of a response, and whether the last one ended it. Returns how many tokens there
are up to the first text that ends it, and this text or None."""


class Model(Protocol):
    """What answers requests."""

    async def complete(self, request: GenerationRequest) -> Completion:
        """Returns the response to a request. If the caller is cancelled, the request is aborted.
        Raises EpisodeFailed of kind "engine" if no engine answers."""


@dataclass(frozen=True)
class Limits:
    """How long rows and calls may be."""

    first_prompt: int
    """The most tokens of the first prompt of an episode, `data.max_prompt_length`."""
    response: int
    """The most tokens behind the prompt of a row, `data.max_response_length`."""
    context: int
    """The most tokens of a prompt and its response, which the engine has room for."""
    call_timeout_s: float
    """The longest time of a call."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a call of the model has drawn."""

    completion: Completion
    stop_reason: int | str | None
    """The token or the text that ended it. None if it has as many tokens as it may have."""


@dataclass(eq=False)
class Session:
    """The calls of the model of one attempt at an episode.

    The first call draws the tokens that `generate_sequences` draws for its prompt. The seed of a
    later call depends on the episode, on its prompt, and on how often that prompt came before, so
    the order of parallel calls does not matter.
    """

    spec: EpisodeSpec
    model: Model
    limits: Limits
    name: str
    """A name that no other attempt at an episode has."""
    rows: list[Row] = field(default_factory=list)
    turns: dict[int, Turn] = field(default_factory=dict)
    """The calls that were answered, by their numbers."""
    counts: Counter[str] = field(default_factory=Counter)
    num_calls: int = 0
    _num_repeats: Counter[bytes] = field(default_factory=Counter)

    def check_room(self, prompt_ids: TokenIds) -> None:
        """Raises RoomUsedUp if `draw` does for this prompt."""
        row = self._row_of(prompt_ids)
        self._room(row, prompt_ids)

    async def draw(
        self,
        prompt_ids: TokenIds,
        *,
        max_tokens: int | None = None,
        stop_token_ids: TokenIds = (),
        find_stop: FindStop | None = None,
    ) -> Drawn:
        """Calls the model, and records what it draws.

        The other settings of sampling are the configuration's. Raises RoomUsedUp if the prompt is
        longer than it may be or leaves no room for a token, and EpisodeFailed if no engine answers,
        or not in time.

        Args:
            prompt_ids: the tokens of the prompt.
            max_tokens: the most tokens to draw. None means as many as there is room for.
            stop_token_ids: tokens that end the response, besides those of the model.
            find_stop: finds a text that ends it too. What is behind the text is not recorded.
        """
        row = self._row_of(prompt_ids)
        room = self._room(row, prompt_ids)
        sampling = self.spec.request.sampling
        length = min(room, sampling.max_tokens)
        if max_tokens is not None:
            length = min(length, max_tokens)
        stop_tokens = sorted({*sampling.stop_token_ids, *stop_token_ids})
        number = self.num_calls
        self.num_calls += 1
        sampling = replace(sampling, max_tokens=length, stop_token_ids=tuple(stop_tokens))
        request = replace(
            self.spec.request,
            name=f"{self.name}, call {number}",
            episode=self.spec.request.name,
            prompt_ids=list(prompt_ids),
            seed=self._seed(prompt_ids),
            sampling=sampling,
        )
        started = time.monotonic()
        row.is_extended = True
        try:
            async with asyncio.timeout(self.limits.call_timeout_s):
                completion = await self.model.complete(request)
        except TimeoutError:
            text = f"a call of the model took over {self.limits.call_timeout_s:g} s"
            raise EpisodeFailed("deadline", text) from None
        finally:
            row.is_extended = False
        seconds = time.monotonic() - started
        drawn = _stopped(completion, sampling.stop_token_ids, find_stop)
        self._record(number, row, prompt_ids, drawn.completion, seconds)
        return drawn

    def finish(self, reward: Any) -> tuple[FinishedRow, ...]:
        """Returns the rows as arrays, with their rewards, in the order of their last calls.

        So every token, also one of a sub-agent, stands before the reward of the last call, for
        estimators that add up the rewards behind a token.

        One reward stands on the last token of the last call. Raises RewardProblem if there are
        several, but not one for each call that was answered, or if one is no finite number.
        """
        numbers = sorted(self.turns)
        if isinstance(reward, list | tuple):
            rewards = list(reward)
        else:
            rewards = [reward]
            numbers = numbers[-1:]
        if len(rewards) != len(numbers) and numbers:
            raise RewardProblem(
                f"{len(rewards)} rewards were given for {len(numbers)} calls of the model: give "
                "one number, or one for each call"
            )
        for value in rewards:
            if not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD:
                raise RewardProblem(f"the reward {reward!r:.100} is no finite number of 32 bits")
        self.rows.sort(key=lambda row: max(row.ends))
        for number, turn in self.turns.items():
            turn.row = [number in row.ends for row in self.rows].index(True)
        by_call: dict[int, float] = dict(zip(numbers, rewards, strict=False))
        return tuple(row.finished(by_call) for row in self.rows)

    def _row_of(self, prompt_ids: TokenIds) -> Row:
        """Returns the row that a prompt continues, or a new one. A row that another call extends
        already is not continued."""
        for row in reversed(self.rows):
            if not row.is_extended and row.is_continued_by(prompt_ids):
                return row
        return Row(prompt_ids)

    def _room(self, row: Row, prompt_ids: TokenIds) -> int:
        """Returns how many tokens may be drawn behind a prompt that continues `row`."""
        limits = self.limits
        is_first = self.num_calls == 0
        if not prompt_ids or (is_first and len(prompt_ids) > limits.first_prompt):
            raise RoomUsedUp(
                f"the first prompt has {len(prompt_ids)} tokens, but 1 to "
                f"data.max_prompt_length={limits.first_prompt} are possible"
            )
        num_behind = len(prompt_ids) - row.num_prompt_tokens
        room = min(limits.response - num_behind, limits.context - len(prompt_ids))
        if room < 1:
            raise RoomUsedUp(
                f"the prompt has {len(prompt_ids)} tokens, of which {num_behind} are behind the "
                f"prompt of their row: data.max_response_length={limits.response} and the model's "
                f"context of {limits.context} leave no room"
            )
        return room

    def _seed(self, prompt_ids: TokenIds) -> int:
        """Returns the seed of the next call, an integer of 63 bits."""
        tokens = np.array(prompt_ids, np.int64).tobytes()
        num_before = self._num_repeats[tokens]
        self._num_repeats[tokens] += 1
        seed = self.spec.request.seed
        if self._num_repeats.total() == 1:
            return seed
        key = repr((seed, num_before)).encode() + tokens
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def _record(
        self, number: int, row: Row, prompt_ids: TokenIds, completion: Completion, seconds: float
    ) -> None:
        counts = self.counts
        if not row.ends:
            self.rows.append(row)
            counts["rows"] += 1
        else:
            counts["joined_calls"] += 1
        counts["calls"] += 1
        counts["prompt_tokens"] += len(prompt_ids)
        counts["cached_tokens"] += completion.num_cached_tokens
        row.extend(number, prompt_ids, completion)
        num_drawn = len(completion.token_ids)
        self.turns[number] = Turn(self.rows.index(row), num_drawn, seconds)


def _stopped(completion: Completion, stop_token_ids: TokenIds, find_stop: FindStop | None) -> Drawn:
    """Says what ended a response, and drops the tokens behind a text that did."""
    token_ids = completion.token_ids.tolist()
    stop_token = None
    if token_ids[-1] in stop_token_ids:
        stop_token = token_ids[-1]
    if find_stop is None:
        return Drawn(completion, stop_token)
    length, text = find_stop(token_ids, stop_token is not None)
    if text is None:
        return Drawn(completion, stop_token)
    versions = [
        (version, start, min(end, length))
        for version, start, end in completion.versions
        if start < length
    ]
    kept = Completion(
        completion.token_ids[:length],
        completion.log_probs[:length],
        tuple(versions),
        completion.num_cached_tokens,
        _routing_of_first(completion, length),
    )
    return Drawn(kept, text)


def _routing_of_first(completion: Completion, length: int) -> np.ndarray | None:
    """Returns the routing of a prompt and the first `length` tokens of its response, if it is
    recorded."""
    routing = completion.routed_experts
    if routing is None:
        return None
    num_dropped = len(completion.token_ids) - length
    kept = routing[: len(routing) - num_dropped].copy()
    kept[-1] = OWN  # nothing is drawn after the last token
    return kept
