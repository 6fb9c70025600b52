"""Defines what the `state` in the manifest of a checkpoint has, for each kind of run.

Anything else is refused. The manifest is JSON, which anybody can write: its hash says that it is
complete, not who wrote it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]

LAST_ROW = "last_row"
"""The key of the last step's metrics. Its checkpoint has them because it is written before the last
validation, after which the row of the step is written."""
IS_COMPLETE = "is_complete"
"""A key in the same state. It is set when the last validation has been recorded."""


class StateModel(BaseModel):
    """The base of these models, and of the manifest. Unknown keys and values of another type are
    refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RecordFiles(StateModel):
    """The lengths in bytes to which a resumed run cuts its files. It cuts no other file."""

    metrics: Count = Field(alias="metrics.jsonl")
    timeline: Count = Field(alias="timeline.jsonl")
    generations: Count = Field(0, alias="generations.jsonl")
    episodes: Count = Field(0, alias="episodes.jsonl")
    """These two are 0 for a run of an earlier version, which has no such file."""


class Shown(StateModel):
    """The generations that the report shows, and how many validations there were."""

    generations: list[dict[str, str | int]]
    num_validations: Count


class Best(StateModel):
    """The step with the best validation."""

    step: Count
    metric: str
    value: float


class RecordState(StateModel):
    """The state of the record, which every run has. A trainer of a plugin may add its own keys."""

    model_config = ConfigDict(extra="allow")

    files: RecordFiles
    shown: Shown
    best: Best | Annotated[dict[str, str], Field(max_length=0)] = {}
    last_row: dict[str, float] | None = None
    is_complete: bool = False


class LoopState(RecordState):
    """The state of `TrainingLoop`."""

    model_config = ConfigDict(extra="forbid")

    global_step: Count


class PPOState(LoopState):
    """The state of `RayPPOTrainer`."""

    num_prompt_batches: Count
    upcoming_batch: Count
    version: Count
    kl_coef: float


class PluginPPOState(PPOState):
    """The state of a plugin's trainer of PPO. Its `restore` has to check the keys that it adds."""

    model_config = ConfigDict(extra="allow")


class LedgerState(StateModel):
    """`PromptLedger.state`."""

    trained: list[Count]
    unfinished: list[tuple[Count, Count]]
    next_number: Count
    dropped: dict[Literal["maker_lost", "agents_failed"], Count]
    effective_sample_sizes: list[float]
    kl_coefs: list[tuple[Count, float]]


class DetachedState(RecordState):
    """The state of a detached run."""

    model_config = ConfigDict(extra="forbid")

    ledger: LedgerState
    validated: Annotated[int, Field(ge=-1)]
