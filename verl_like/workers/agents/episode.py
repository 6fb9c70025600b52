"""What is recorded of an episode, and how it can fail."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from verl_like.workers.agents.turns import Turn
from verl_like.workers.rollout.request import Completion, GenerationRequest, VersionSpan

TokenIds = Sequence[int]
FailureKind = Literal["environment", "harness", "engine", "deadline"]
"""The kinds of failures that are not the policy's."""
Reward = float | Sequence[float] | None
"""The reward of an episode: one number, one for each of its calls of the model, or None, which
leaves the episode out of training and of its group's baseline."""


class EpisodeFailed(RuntimeError):
    """An episode cannot go on, for a reason that is not the policy's. The attempt counts."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class AgentsFailed(RuntimeError):
    """All episodes have failed for as long as a step takes, so that nothing could be trained."""


class Restarted(RuntimeError):
    """The process of an episode's environment or harness ended because of another episode. The
    episode begins again, and no attempt counts."""


class RewardProblem(RuntimeError):
    """An environment, a harness or a trace gave something that is no reward."""


class RoomUsedUp(ValueError):
    """There is no room for another token of an episode: its row, or the model's context, is
    full."""


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to run."""

    request: GenerationRequest
    """The request of its first call: the prompt of the dataset, and the seed and the sampling of
    all calls."""
    row: Mapping[str, Any]
    """The row of the dataset, which environments and harnesses get."""


class Row:
    """A sequence of tokens of an episode: a prompt, and drawn and inserted tokens behind it.

    A call of the model whose prompt continues the tokens of a row extends the row.
    """

    def __init__(self, prompt_ids: TokenIds) -> None:
        self.token_ids = list(prompt_ids)
        """The prompt and what follows it."""
        self.num_prompt_tokens = len(prompt_ids)
        self.is_drawn: list[bool] = []
        """For each token behind the prompt, whether the policy drew it."""
        self.log_probs: list[float] = []
        """For each token behind the prompt its log-probability, 0 for inserted ones."""
        self.spans: list[VersionSpan] = []
        """Which weights drew which tokens behind the prompt."""
        self.routed_experts: np.ndarray | None = None
        """The experts of each token up to the last drawn one, if they are recorded: (tokens,
        layers, experts of a token)."""
        self.ends: dict[int, int] = {}
        """For the number of each call, the place of its last drawn token behind the prompt."""
        self.is_extended = False
        """True while a call that extends the row is running."""

    def is_continued_by(self, prompt_ids: TokenIds) -> bool:
        """Returns whether a prompt begins with all tokens of this row."""
        length = len(self.token_ids)
        return list(prompt_ids[:length]) == self.token_ids

    def extend(self, number: int, prompt_ids: TokenIds, completion: Completion) -> None:
        """Adds the tokens of call `number`: those that its prompt inserts, and the drawn ones."""
        self.insert(prompt_ids[len(self.token_ids) :])
        start = len(self.is_drawn)
        drawn = completion.token_ids.tolist()
        self.token_ids += drawn
        self.is_drawn += [True] * len(drawn)
        self.log_probs += completion.log_probs.tolist()
        for version, first, end in completion.versions:
            self.spans.append((version, start + first, start + end))
        self.ends[number] = len(self.is_drawn) - 1
        if completion.routed_experts is not None:
            self._add_routing(completion.routed_experts)

    def _add_routing(self, routing: np.ndarray) -> None:
        """Adds the routing that a call has recorded, of its prompt and of what it drew.

        Tokens of earlier calls keep the routing by which those drew the next token. The last one of
        the call before has none of that call.
        """
        before = self.routed_experts
        if before is not None:
            num_kept = len(before) - 1
            kept = before[:num_kept]
            new = routing[num_kept:]
            routing = np.concatenate([kept, new])
        self.routed_experts = routing

    def insert(self, token_ids: TokenIds) -> None:
        """Adds tokens that were not drawn."""
        self.token_ids += token_ids
        self.is_drawn += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)

    def finished(self, rewards: Mapping[int, float]) -> "FinishedRow":
        """Returns the row as arrays. `rewards` has the rewards of calls by their numbers; each
        stands on the last drawn token of its call."""
        scores = np.zeros(len(self.is_drawn), np.float32)
        for number, place in self.ends.items():
            scores[place] = rewards.get(number, 0.0)
        token_ids = np.array(self.token_ids, np.int64)
        length = self.num_prompt_tokens
        return FinishedRow(
            prompt_ids=token_ids[:length],
            response_ids=token_ids[length:],
            response_mask=np.array(self.is_drawn, np.int64),
            log_probs=np.array(self.log_probs, np.float32),
            scores=scores,
            versions=tuple(self.spans),
            routed_experts=self.routed_experts,
        )


@dataclass(frozen=True, eq=False)
class FinishedRow:
    """A row of an episode that has ended. R is the number of tokens behind its prompt."""

    prompt_ids: np.ndarray
    """(P,) int64."""
    response_ids: np.ndarray
    """(R,) int64."""
    response_mask: np.ndarray
    """(R,) int64: 1 on drawn tokens."""
    log_probs: np.ndarray
    """(R,) float32, 0 on inserted tokens."""
    scores: np.ndarray
    """(R,) float32: the rewards, each on a drawn token."""
    versions: tuple[VersionSpan, ...]
    """The spans of drawn tokens. Inserted tokens are in none."""
    routed_experts: np.ndarray | None = None
    """(P + R, layers, experts of a token), as in the column of the batch, if it is recorded."""


@dataclass(frozen=True, eq=False)
class Episode:
    """An episode that has ended, as the driver gets it."""

    name: str
    """The name of its request."""
    rows: tuple[FinishedRow, ...]
    """Empty if it failed, or if the model was never called."""
    has_reward: bool
    """False if its reward is None: it is then left out of training."""
    ended: str
    """"done", or why it could not go on: "turns" or "room" (both are trained), or "failed"."""
    failures: tuple[tuple[FailureKind, str], ...] = ()
    """The kind of the failure of each attempt that failed, and what happened."""
    reward_problem: str = ""
    """What was given in place of a reward, if it was none."""
    counts: Counter[str] = field(default_factory=Counter)
    """What happened how often: see docs/metrics.md."""
    turns: tuple[Turn, ...] = ()
    started: float = 0.0
    """The time by time.time() at which its last attempt began."""
    seconds: float = 0.0
    """How long its last attempt took."""
