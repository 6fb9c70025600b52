"""Defines what the `state` in the manifest of a checkpoint holds, by the kind of run.

Anything else is refused. The manifest is JSON that anybody can write: its hash says that it is
whole, not who wrote it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]

LAST_ROW = "last_row"
"""A key in the state of a run's last step, which is saved before the last validation: the metrics
of the step until then."""
IS_COMPLETE = "is_complete"
"""A key in the same state, as soon as the validation is recorded."""


class StateModel(BaseModel):
    """The base of these blocks. Values keep their type, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RecordFiles(StateModel):
    """Lengths in bytes of the files that a resumed run cuts; it cuts no other file."""

    metrics: Annotated[int, Field(ge=0, alias="metrics.jsonl")]
    timeline: Annotated[int, Field(ge=0, alias="timeline.jsonl")]
    generations: Annotated[int, Field(ge=0, alias="generations.jsonl")] = 0
    """A run of an earlier version has no such file."""


class Shown(StateModel):
    """What was shown of the validations."""

    generations: list[dict[str, str | int]]
    num_validations: Count


class Best(StateModel):
    """The step with the best validation."""

    step: Count
    metric: str
    value: float


class RecordState(StateModel):
    """The state of the record, which every run has.

    A trainer outside the package may add its own keys.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    files: RecordFiles
    shown: Shown
    best: Best | Annotated[dict[str, str], Field(max_length=0)] = {}
    last_row: dict[str, float] | None = None
    is_complete: bool = False


class LoopState(RecordState):
    """The state of `TrainingLoop`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    global_step: Count


class PPOState(LoopState):
    """The state of `RayPPOTrainer`."""

    num_prompt_batches: Count
    upcoming_batch: Count
    version: Count
    kl_coef: float


class PluginPPOState(PPOState):
    """The state of a plugin's subclass, which checks in its `restore` what it adds."""

    model_config = ConfigDict(extra="allow", strict=True)


class LedgerState(StateModel):
    """`PromptLedger.state`."""

    trained: list[Count]
    unfinished: list[tuple[Count, Count]]
    next_number: Count
    dropped: dict[Literal["maker_lost"], Count]
    effective_sample_sizes: list[float]
    kl_coefs: list[tuple[Count, float]]


class DetachedState(RecordState):
    """The state of a detached run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ledger: LedgerState
    validated: Annotated[int, Field(ge=-1)]
