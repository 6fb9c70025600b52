"""What makers and trainers have in common: how they are found, what they send each other, and what
they record."""

import functools
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from verl_like.plugins import import_plugins
from verl_like.protocol import Metric, merge_metrics
from verl_like.single_controller import CallEvent
from verl_like.single_controller.failure import CallTimeout, WorkerDied
from verl_like.single_controller.ray.node_watch import of_memory_monitor
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.shard import ForwardedFuture
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.state.checkpoint import PendingCheckpoint
from verl_like.trainer.state.resume import ResumedRun, changed_inputs

LEDGER = "ledger"
"""Name of the actor that is the run's `PromptLedger`."""
POLL_S = 0.1
GONE = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""What Ray raises for a call of a side that died, or that Ray's memory monitor killed."""

remote: Any = ray.remote  # whose type does not know concurrency groups

ModelFn = Callable[[DetachedConfig], Mapping[str, RayClassWithInitArgs]]
"""(configuration) -> the worker class of each role that a maker or a trainer runs."""
EnvInfo = Mapping[str, str | int]
"""`rank` and `world_size`: which of the makers, or of the trainers, a side is, and how many there
are. Several trainers meet in the store at `master_addr` and `master_port`, see `JointTrainer`;
makers do not meet."""


@dataclass(frozen=True)
class PushedWeights:
    """The weights of one version: what each trained role exported, as an argument of any driver's
    worker groups."""

    version: int
    exports: Mapping[str, ForwardedFuture]
    address: tuple[str, int] | None = None
    """Where the actor waits for the maker that asked, with `rollout.weight_transport=nccl`."""


@dataclass
class SideRecorder:
    """The `Recorder` of a side, and the `LoopRecorder` of a trainer.

    The run collects what happened since its last report.
    """

    name: str
    events: deque[CallEvent] = field(default_factory=deque)
    rows: deque[tuple[int, Mapping[str, Metric], float]] = field(default_factory=deque)
    """(training step, metrics, when it ended) of a trainer, (version, metrics, when) of a maker's
    validations."""
    states: deque[tuple[int, Mapping[str, Any]]] = field(default_factory=deque)
    """(training step, what a trainer saved of it beside its files), see `DetachedPPOTrainer.state`.
    It is reported with the row of the step, or before."""
    files: deque[tuple[int, Mapping[str, Any]]] = field(default_factory=deque)
    """(training step, the files that the ranks of a trainer wrote of its checkpoint, see
    `PendingCheckpoint`)."""
    waits: deque[tuple[float, float]] = field(default_factory=deque)
    """(start, end) of waits for other sides. One that lasts is reported until now, and again in the
    next report."""
    notes: deque[str] = field(default_factory=deque)
    """What the user should know."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each phase of the driver so far."""
    placement: list[dict[str, str]] = field(default_factory=list)
    """Where its workers are, see `placement_rows`; empty until they have started."""
    node: str = field(default_factory=ray.util.get_node_ip_address)
    pid: int = field(default_factory=os.getpid)
    doing: tuple[str, float] = field(default_factory=lambda: ("starting", time.time()))
    """The phase of the side's loop, and since when."""
    thread: int = 0
    """Of the side's loop, which measures the phases."""
    run_dir: Path = field(default_factory=Path)
    """Where the checkpoints of the run are."""
    resumed: ResumedRun | None = None
    """None: a trainer is told what it goes on with."""
    saves_when_ended: bool = False
    is_ending: bool = False
    """SIGTERM comes to the run, which has the ledger say after which step it ends."""
    pending: PendingCheckpoint | None = None

    def record(self, event: CallEvent) -> None:
        """Adds a call of a worker."""
        self.events.append(event)

    def say(self, note: str) -> None:
        """Adds what the user should know."""
        self.notes.append(note)

    def show_placement(self, rows: list[dict[str, str]]) -> None:
        """Keeps where the workers are."""
        self.placement = rows

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the seconds of a phase, which is the side's status meanwhile."""
        before = self.doing
        started = time.time()
        self.doing, self.thread = (phase, started), threading.get_ident()
        yield
        self.doing = before
        ended = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + ended - started
        if phase.startswith("waiting"):
            self.waits.append((started, ended))

    @contextmanager
    def step(
        self, step: int, total_steps: int, row: dict[str, float] | None = None
    ) -> Iterator[Callable[[Mapping[str, Metric | float]], None]]:
        """Times a step of a trainer; metrics given to the yielded function are in its row."""
        started = time.time()
        given: list[Mapping[str, Any]] = []
        self.seconds = {}

        def log(metrics: Mapping[str, Metric | float]) -> None:
            assert all(isinstance(metric, Metric) for metric in metrics.values()), (
                "rows of several trainers are merged"
            )
            given.append(metrics)

        yield log
        ended = time.time()
        seconds = {"step": ended - started} | self.seconds
        timings = {
            f"timing_s/{name.replace(' ', '_')}": Metric.max(value)
            for name, value in seconds.items()
        }
        self.rows.append((step, merge_metrics([*given, timings]), ended))

    def validation(self) -> AbstractContextManager[None]:
        """The phase of a validation."""
        return self.timer("testing")

    def log_validation(self, metrics: dict[str, float], step: int = 0) -> None:
        """Adds a row for the validation of a version."""
        self.rows.append(
            (step, {name: Metric.mean(value) for name, value in metrics.items()}, time.time())
        )

    def is_best(self, step: int, metrics: dict[str, float]) -> bool:
        """No: in detached training validations come after saves."""
        return False

    def begin_checkpoint(
        self, partial: Path, step: int, state: dict[str, Any], groups: Mapping[str, WorkerGroup]
    ) -> None:
        """Keeps what the run saves of a step, until `commit_checkpoint` finds the files of this
        trainer written."""
        assert self.pending is None
        self.states.append((step, state))
        self.pending = PendingCheckpoint(partial, step, state, groups)

    def commit_checkpoint(self, wait: bool) -> None:
        """Reports the files of the checkpoint that is being written, if they are written or with
        `wait`."""
        if self.pending and (files := self.pending.files(wait)) is not None:
            self.files.append((self.pending.step, files))
            self.pending = None

    def complete_checkpoint(self, step: int) -> None:
        """Nothing: the run does when the makers have validated."""

    def show_generations(
        self,
        step: int,
        num_rows: int,
        generation_of_row: Callable[[int], dict[str, str]],
        num_shown: int,
    ) -> None:
        """Shows nothing: of a validation the run shows the metrics alone."""

    def report(self) -> "SideRecorder":
        """What was recorded since the last report."""
        # The loop may add to them meanwhile.
        events = deque(self.events.popleft() for _ in range(len(self.events)))
        rows = deque(self.rows.popleft() for _ in range(len(self.rows)))
        # Those of the rows among them
        states = deque(self.states.popleft() for _ in range(len(self.states)))
        # Those from before the rows among them
        files = deque(self.files.popleft() for _ in range(len(self.files)))
        notes = deque(self.notes.popleft() for _ in range(len(self.notes)))
        phase, since = self.doing
        waits = deque([(since, time.time())] if phase.startswith("waiting") else [])
        waits.extend(self.waits.popleft() for _ in range(len(self.waits)))
        return replace(
            self,
            events=events,
            rows=rows,
            states=states,
            files=files,
            waits=waits,
            notes=notes,
            seconds={},
            pending=None,
        )

    def status_and_stack(self) -> str:
        """What the side does, or what it waits for, since when, and the innermost calls of its
        loop."""
        frame = sys._current_frames().get(self.thread)
        stack = traceback.format_stack(frame, limit=12) if frame else ["  Its loop has ended.\n"]
        phase, since = self.doing
        return f"{self.name}: {phase} for {time.time() - since:.0f} s\n{''.join(stack)}"


def side_named(name: str) -> Any:
    """The actor of a maker, a trainer or the ledger. Raises WorkerDied if there is none any
    more."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise side_died(name, "a call", error) from None


def side_died(name: str, method: str, error: Exception) -> WorkerDied:
    """What says that a side is gone; the run knows where it was."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return WorkerDied(name, 0, "?", 0, method, *of_memory_monitor(error))
    return WorkerDied(name, 0, "?", 0, method, str(error).strip().splitlines()[-1])


@dataclass(frozen=True)
class Question:
    """A call of another side, which may still be at work."""

    name: str
    method: str
    answer: Any
    timeout: float

    @classmethod
    def asked(cls, name: str, method: str, *args: Any, timeout: float) -> "Question":
        """Calls the side; raises WorkerDied if there is none of this name."""
        return cls(name, method, getattr(side_named(name), method).remote(*args), timeout)

    def get(self) -> Any:
        """The answer. Raises WorkerDied, or CallTimeout if it takes more than `timeout` seconds
        from now on."""
        try:
            return ray.get(self.answer, timeout=self.timeout)
        except ray.exceptions.GetTimeoutError:
            raise CallTimeout(self.name, self.method, self.timeout, self.name) from None
        except GONE as error:
            raise side_died(self.name, self.method, error) from None


def ask(name: str, method: str, *args: Any, timeout: float) -> Any:
    """The answer of another side. Raises WorkerDied, or CallTimeout if it takes more than `timeout`
    seconds."""
    return Question.asked(name, method, *args, timeout=timeout).get()


class LedgerHandle:
    """The ledger's methods, each with a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(ask, LEDGER, method, timeout=self.deadline_s)


class Side:
    """What makers and trainers do alike. Each is a named Ray actor with the concurrency group
    `status`.

    `config` is that of the run, `model_fn` gives the worker class of each role that this side runs,
    by default those of the configuration, and `pools` are what its workers run on; by default it
    reserves those of the configuration. `fingerprints` are those of the files that the run began
    with, with which this side compares what it has read.
    """

    def __init__(
        self,
        config: DetachedConfig,
        model_fn: ModelFn | None,
        env_info: EnvInfo | None,
        pools: ResourcePoolManager | None,
        fingerprints: Mapping[str, str] | None,
    ) -> None:
        import_plugins(config.plugins)
        name = ray.get_runtime_context().get_actor_name()
        assert name is not None, "every side is a Ray actor with a name"
        self.name = name
        self.env_info = env_info or {"rank": 0, "world_size": 1}
        self.index = int(self.env_info["rank"])
        self.model_fn = model_fn
        self.pools = pools
        self.fingerprints = fingerprints
        self.recorder = SideRecorder(self.name, run_dir=Path(config.trainer.default_local_dir))
        self.ledger = LedgerHandle(config.trainer.call_timeout_s)
        self.pushed: PushedWeights | None = None

    def require_same_inputs(self, config: DetachedConfig) -> None:
        """Raises ValueError if data, models or the reward function are not those that the run began
        with.

        It is called after they were read, because they may change meanwhile.
        """
        if self.fingerprints is not None and (changed := changed_inputs(self.fingerprints, config)):
            raise ValueError(
                f"{self.name} read other files than the run began with: {', '.join(changed)}. "
                "They changed during the run, or are not the same on every node. Restore them, "
                "and the same command continues the run from its newest checkpoint."
            )

    @ray.method(concurrency_group="status")
    def report(self) -> SideRecorder:
        """What happened since the last report; an actor that does not answer is stopped or dead."""
        return self.recorder.report()

    @ray.method(concurrency_group="status")
    def status(self) -> str:
        """What this side does now, and the stack of its loop."""
        return self.recorder.status_and_stack()
