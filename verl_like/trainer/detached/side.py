"""What makers and trainers of detached training have in common: how they find and call each other,
and what they record. Each of them is called a side."""

import functools
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from verl_like.trainer.loop.recorder import Log, LoopRecorder
from verl_like.trainer.state.checkpoint import Digests, PendingCheckpoint
from verl_like.trainer.state.resume import changed_inputs

LEDGER = "ledger"
"""The name of the actor that is the run's `PromptLedger`."""
POLL_S = 0.1
"""How many seconds a wait lasts before the loop looks again."""
GONE = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Ray raises these errors for a call of a side that died or was killed by Ray's memory monitor."""

remote: Any = ray.remote  # the type of ray.remote does not know concurrency groups

ModelFn = Callable[[DetachedConfig], Mapping[str, RayClassWithInitArgs]]
"""A function that takes the configuration and returns the worker class of each role of a side."""
EnvInfo = Mapping[str, str | int]
"""`rank` says which of the makers, or of the trainers, a side is, and `world_size` how many there
are. Several trainers meet in the store at `master_addr` and `master_port`, see `JointTrainer`."""


@dataclass(frozen=True)
class PushedWeights:
    """The exports of one version of the weights, by role. Any driver can give them to its own
    worker groups."""

    version: int
    exports: Mapping[str, ForwardedFuture]
    address: tuple[str, int] | None = None
    """With `rollout.weight_transport=nccl`, the address at which the actor waits for the maker that
    asked."""


@dataclass
class SideRecorder(LoopRecorder):
    """The `Recorder` of a side, and the `LoopRecorder` of a trainer.

    It keeps what happens until the run collects it as a report. `show_generations` does nothing,
    because the run shows only the metrics of a validation. `complete_checkpoint` does nothing,
    because the run completes the checkpoint when the makers have validated.
    """

    name: str
    events: deque[CallEvent] = field(default_factory=deque)
    """The calls of workers that have ended."""
    rows: deque[tuple[int, Mapping[str, Metric], float]] = field(default_factory=deque)
    """A trainer has (training step, metrics, time at its end) for each step. A maker has (version,
    metrics, time at its end) for each validation."""
    states: deque[tuple[int, Mapping[str, Any]]] = field(default_factory=deque)
    """(training step, `DetachedPPOTrainer.state` after it) for each checkpoint of a trainer. It is
    reported together with the row of the step, or before it."""
    files: deque[tuple[int, Digests]] = field(default_factory=deque)
    """(training step, the files that the ranks of a trainer wrote) for each checkpoint, see
    `PendingCheckpoint`."""
    waits: deque[tuple[float, float]] = field(default_factory=deque)
    """(start, end) of each wait for other sides. A wait that has not ended is reported with the
    present time as its end, and again in the next report."""
    notes: deque[str] = field(default_factory=deque)
    """Notes for the user."""
    episodes: deque[dict[str, Any]] = field(default_factory=deque)
    """Records of episodes."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The seconds of each phase of the driver since the step began."""
    placement: list[dict[str, str]] = field(default_factory=list)
    """Where the workers of the side are, see `placement_rows`. Empty until they have started."""
    node: str = field(default_factory=ray.util.get_node_ip_address)
    pid: int = field(default_factory=os.getpid)
    doing: tuple[str, float] = field(default_factory=lambda: ("starting", time.time()))
    """The present phase of the side's loop, and when it began."""
    thread: int = 0
    """The id of the thread in which the side's loop runs."""
    run_dir: Path = field(default_factory=Path)
    """The folder of the run, in which its checkpoints are."""
    resumed = None
    """It is always None here. `DetachedPPOTrainer.fit` gets a resumed run's checkpoint itself."""
    saves_when_ended: bool = False
    is_ending = False
    """It is always False here. The process of the run gets SIGTERM, and tells the ledger."""
    pending: PendingCheckpoint | None = None
    """The checkpoint whose files the workers are writing."""

    def record(self, event: CallEvent) -> None:
        """Keeps a call of a worker for the next report."""
        self.events.append(event)

    def say(self, note: str) -> None:
        """Keeps a note to the user for the next report."""
        self.notes.append(note)

    def show_placement(self, rows: list[dict[str, str]]) -> None:
        """Keeps where the workers are."""
        self.placement = rows

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Measures the seconds of the code inside as those of a phase. The side reports the phase
        as what it is doing. A phase whose name begins with "waiting" counts as idle time."""
        before = self.doing
        started = time.time()
        self.doing = (phase, started)
        self.thread = threading.get_ident()
        yield
        self.doing = before
        ended = time.time()
        seconds_before = self.seconds.get(phase, 0.0)
        self.seconds[phase] = seconds_before + (ended - started)
        if phase.startswith("waiting"):
            self.waits.append((started, ended))

    @contextmanager
    def step(
        self, step: int, total_steps: int, row: dict[str, float] | None = None
    ) -> Iterator[Log]:
        """Measures a step of a trainer and keeps its row. It yields a function that adds metrics to
        the row."""
        started = time.time()
        given: list[Mapping[str, Any]] = []
        self.seconds = {}

        def log(metrics: Mapping[str, Metric | float]) -> None:
            for metric in metrics.values():
                assert isinstance(metric, Metric), "rows of several trainers are merged"
            given.append(metrics)

        yield log
        ended = time.time()
        seconds_of_step = ended - started
        timings = {"timing_s/step": Metric.max(seconds_of_step)}
        for phase, seconds in self.seconds.items():
            name = phase.replace(" ", "_")
            timings[f"timing_s/{name}"] = Metric.max(seconds)
        row_of_step = merge_metrics([*given, timings])
        self.rows.append((step, row_of_step, ended))

    def validation(self) -> AbstractContextManager[None]:
        """Measures a validation as a phase."""
        return self.timer("testing")

    def log_validation(self, metrics: dict[str, float], step: int = 0) -> None:
        """Keeps the row of a validation with the weights of version `step`."""
        means = {name: Metric.mean(value) for name, value in metrics.items()}
        self.rows.append((step, means, time.time()))

    def is_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Returns False, because in detached training a step is saved before it is validated."""
        return False

    def begin_checkpoint(
        self, partial: Path, step: int, state: dict[str, Any], groups: Mapping[str, WorkerGroup]
    ) -> None:
        """Keeps the state of a step for the next report, and remembers that the workers are writing
        the files of this trainer. `commit_checkpoint` reports the files."""
        assert self.pending is None
        self.states.append((step, state))
        self.pending = PendingCheckpoint(partial, step, state, groups)

    def commit_checkpoint(self, wait: bool) -> None:
        """Keeps the files of the checkpoint for the next report, once all are written. With `wait`
        it waits for them; without, it does nothing while some are missing."""
        if self.pending is None:
            return
        files = self.pending.files(wait)
        if files is not None:
            self.files.append((self.pending.step, files))
            self.pending = None

    def show_episodes(self, records: Iterable[dict[str, Any]]) -> None:
        """Keeps records of episodes for the next report."""
        self.episodes.extend(records)

    def report(self) -> "SideRecorder":
        """Returns what was recorded since the last report, and forgets it."""
        # The loop may record more meanwhile. Rows are taken before states and files, so that the
        # state of each reported row, and the files that were written before it, are reported too.
        report = replace(
            self,
            events=take_all(self.events),
            rows=take_all(self.rows),
            states=take_all(self.states),
            files=take_all(self.files),
            notes=take_all(self.notes),
            episodes=take_all(self.episodes),
            seconds={},
            pending=None,
        )
        phase, since = self.doing
        now = time.time()
        report.waits = take_all(self.waits)
        if phase.startswith("waiting"):
            report.waits.appendleft((since, now))
        return report

    def status_and_stack(self) -> str:
        """Says in which phase the side's loop is, since when, and what its innermost calls are."""
        frame = sys._current_frames().get(self.thread)
        stack = "  Its loop has ended.\n"
        if frame:
            stack = "".join(traceback.format_stack(frame, limit=12))
        phase, since = self.doing
        seconds = time.time() - since
        return f"{self.name}: {phase} for {seconds:.0f} s\n{stack}"


def take_all(queue: deque[Any]) -> deque[Any]:
    """Removes all elements that the queue has now, and returns them. Another thread may add further
    ones meanwhile."""
    return deque(queue.popleft() for _ in range(len(queue)))


def side_named(name: str) -> Any:
    """The actor of a maker, a trainer or the ledger. Raises WorkerDied if there is none of this
    name any more."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise side_died(name, "a call", error) from None


def side_died(name: str, method: str, error: Exception) -> WorkerDied:
    """Makes the error for a side that died. The run adds its node and its process."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        cause, shortage = of_memory_monitor(error)
        return WorkerDied(name, 0, "?", 0, method, cause, shortage)
    lines = str(error).strip().splitlines()
    return WorkerDied(name, 0, "?", 0, method, lines[-1])


@dataclass(frozen=True)
class Question:
    """A call of another side. It may still be running."""

    name: str
    method: str
    answer: Any
    """Ray's reference to the result."""
    timeout: float

    @classmethod
    def asked(cls, name: str, method: str, *args: Any, timeout: float) -> "Question":
        """Calls a method of a side and returns at once. Raises WorkerDied if there is no side of
        this name."""
        call = getattr(side_named(name), method)
        answer = call.remote(*args)
        return cls(name, method, answer, timeout)

    def get(self) -> Any:
        """Waits for the result and returns it. Raises WorkerDied if the side dies, and CallTimeout
        if it takes more than `timeout` seconds from now on."""
        try:
            return ray.get(self.answer, timeout=self.timeout)
        except ray.exceptions.GetTimeoutError:
            raise CallTimeout(self.name, self.method, self.timeout, self.name) from None
        except GONE as error:
            raise side_died(self.name, self.method, error) from None


def ask(name: str, method: str, *args: Any, timeout: float) -> Any:
    """Calls a method of another side and returns its result. Raises WorkerDied if the side dies,
    and CallTimeout if it takes more than `timeout` seconds."""
    return Question.asked(name, method, *args, timeout=timeout).get()


@dataclass(frozen=True)
class LedgerHandle:
    """Calls the methods of the run's `PromptLedger`, which is in another process, each with a
    deadline."""

    deadline_s: float

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(ask, LEDGER, method, timeout=self.deadline_s)


class Side:
    """The base class of makers and trainers. Each is a named Ray actor with the concurrency group
    `status`.

    Args:
        config: the configuration of the run.
        model_fn: gives the worker class of each role that this side runs. By default they are those
            of the configuration.
        env_info: says which of the makers, or of the trainers, this side is.
        pools: the pools in which the workers run. By default the side reserves those of the
            configuration.
        fingerprints: those of the files that the run began with. This side must have read the same
            files.
    """

    config: DetachedConfig
    """The part of the configuration that this side reads. The subclass sets it."""

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
        run_dir = Path(config.trainer.default_local_dir)
        self.recorder = SideRecorder(name, run_dir=run_dir)
        self.ledger: Any = LedgerHandle(config.trainer.call_timeout_s)
        """Has the methods of `PromptLedger`."""
        self.pushed: PushedWeights | None = None

    def require_same_inputs(self) -> None:
        """Raises ValueError if the files of data, models and the reward function are not those that
        the run began with.

        It is called after this side has read them, because they may change until then.
        """
        if self.fingerprints is None:
            return
        changed = changed_inputs(self.fingerprints, self.config)
        if changed:
            raise ValueError(
                f"{self.name} read other files than the run began with: {', '.join(changed)}. "
                "They changed during the run, or are not the same on every node. Restore them, "
                "and the same command continues the run from its newest checkpoint."
            )

    @ray.method(concurrency_group="status")
    def report(self) -> SideRecorder:
        """Returns what happened since the last report. A side answers during its loop too, so one
        that does not answer is stopped or dead."""
        return self.recorder.report()

    @ray.method(concurrency_group="status")
    def status(self) -> str:
        """Says what this side is doing, with the stack of its loop."""
        return self.recorder.status_and_stack()
