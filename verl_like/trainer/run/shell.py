"""Runs any trainer: checks its inputs, records the run, starts Ray, trains, and ends all processes.

A trainer consists of a schema with its rules (trainer/config), `check_inputs`, `fit`, and a
`Display`.
"""

import atexit
import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_like.rewards.manager import RewardError
from verl_like.single_controller.failure import CallTimeout, PlacementError, WorkerError
from verl_like.single_controller.ray.start import end_ray, require_cluster, start_ray
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.memory.keys import keys_that_lower
from verl_like.trainer.memory.pools import check_memory
from verl_like.trainer.run.display import Display
from verl_like.trainer.run.errors import EngineMismatch, InputRefused, RunFailed
from verl_like.trainer.run.messages import say
from verl_like.trainer.run.run_recorder import RunRecorder, UnknownMetric
from verl_like.trainer.run.tracking import require_trackers
from verl_like.trainer.run.worker_template import WorkerTemplate
from verl_like.trainer.state.resume import find_run
from verl_like.trainer.state.run_state import RecordState
from verl_like.workers.agents.episode import AgentsFailed
from verl_like.workers.rollout.router import close_routers

CheckInputs = Callable[[Any, contextlib.ExitStack], Any]
"""What checks the inputs of a trainer, see `run`."""
Fit = Callable[[Any, RunRecorder], None]
"""What trains, see `run`."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What stops a run: an interrupt, and SIGTERM, which ends a pre-empted run."""


def run(
    config: RunConfig,
    check_inputs: CheckInputs,
    fit: Fit,
    display: Display,
    template: WorkerTemplate | None = None,
    state_schema: type[RecordState] = RecordState,
) -> int:
    """Runs a trainer and returns the exit code: 0 done, 1 a part of the run failed, 2 input
    refused, 130 interrupted.

    All input is checked before Ray starts. However the run ends, the processes that it started are
    gone then, and all that it has written is valid.

    Args:
        config: a configuration that keeps its rules.
        check_inputs: returns what the trainer needs, or raises ValueError or RewardError for wrong
            input. The result has `notes` for the start of the run, and the `config` to record, with
            the values that depend on the data. The stack stops what `check_inputs` starts.
        fit: trains until the last step. It is called when Ray has been started.
        display: says what the record shows.
        template: the process that is forked for each worker, if Ray is started here.
        state_schema: what a checkpoint has beside the models.
    """
    # SIGTERM, which a pre-empted run gets, counts as an interrupt too. Without a handler the
    # background jobs of a shell would ignore interrupts.
    handle_signals(signal.default_int_handler)
    with contextlib.ExitStack() as cleanup:
        if template:
            cleanup.callback(template.close)
        try:
            inputs, recorder = begin(config, check_inputs, display, cleanup, state_schema)
        except InputRefused as error:
            return say(str(error), 2)
        except KeyboardInterrupt:
            return say("interrupted before the run started", 130)
        return train(inputs, fit, recorder, template)


def run_or_raise(
    config: RunConfig,
    check_inputs: CheckInputs,
    fit: Fit,
    display: Display,
    template: WorkerTemplate | None = None,
    state_schema: type[RecordState] = RecordState,
    uses_ray: bool = True,
) -> Path:
    """Runs a trainer as `run` does, for a caller in Python. Returns the folder of the run.

    Args:
        uses_ray: False if the workers are objects of this process. The rest is as in `run`.

    Raises:
        InputRefused: an input is wrong. It is a ValueError, raised before Ray starts.
        RunFailed: a part of the run failed.
        KeyboardInterrupt: the run was interrupted.
    """
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(signals_as_before())
        if template:
            cleanup.callback(template.close)
        inputs, recorder = begin(config, check_inputs, display, cleanup, state_schema)
        train_or_raise(inputs, fit, recorder, template, uses_ray)
    return recorder.run_dir


def begin(
    config: RunConfig,
    check_inputs: CheckInputs,
    display: Display,
    cleanup: contextlib.ExitStack,
    state_schema: type[RecordState],
) -> tuple[Any, RunRecorder]:
    """Checks all input and begins the record of the run. Returns what `check_inputs` returned, and
    the recorder. Raises InputRefused, without the secrets of the configuration, for what the user
    has to change."""
    try:
        require_trackers(config.trainer.logger)
        if config.cluster_address:
            require_cluster(config.cluster_address)
        inputs = check_inputs(config, cleanup)
        memory = check_memory(config)
        resumed, notes = find_run(inputs.config, state_schema)
        try:
            recorder = RunRecorder(inputs.config, display, resumed)
        except BaseException as error:
            if resumed:
                # This process may live on and try again.
                resumed.lock.close()
            if isinstance(error, OSError):
                raise ValueError(cannot_be_written(inputs.config, error)) from error
            raise
    except (ValueError, RewardError, OSError) as error:
        redacted = config.redaction()
        raise InputRefused(redacted(str(error))) from None
    for note in [*inputs.notes, *memory, *notes]:
        recorder.say(note)
    return inputs, recorder


def cannot_be_written(config: RunConfig, error: Exception) -> str:
    """Returns the message for a folder of the runs in which nothing can be written."""
    folder = f"trainer.default_local_dir={config.trainer.default_local_dir}"
    return f"{folder} cannot be written ({error}): make room there, or give another."


def train(
    inputs: Any, fit: Fit, recorder: RunRecorder, template: WorkerTemplate | None = None
) -> int:
    """Starts Ray and trains until the last step. Returns the exit code."""
    try:
        train_or_raise(inputs, fit, recorder, template, tell=say)
    except KeyboardInterrupt:
        return 130
    except RunFailed:
        return 1
    return 0


def train_or_raise(
    inputs: Any,
    fit: Fit,
    recorder: RunRecorder,
    template: WorkerTemplate | None,
    uses_ray: bool = True,
    tell: Callable[[str], object] | None = None,
) -> None:
    """Starts Ray, if it is used, and trains until the last step.

    Raises RunFailed, without the secrets of the configuration, if a part of the run fails. `tell`
    gets its text at once, before the record is completed and Ray is ended, which take time.
    """

    def failure(text: str) -> RunFailed:
        text = recorder.redacted(text)
        if tell:
            tell(text)
        return RunFailed(text)

    outcome = "Failed with an unexpected error; standard error has the traceback."
    has_failed = True
    try:
        if uses_ray:
            recorder.say("Starting Ray and the workers ...")
            start_ray_of(inputs.config, template)
        handle_signals(recorder.terminate, [signal.SIGTERM])
        gc.freeze()  # collections need not pass over modules and data sets
        atexit.register(gc.unfreeze)  # else libraries report what is left at the end as leaks
        fit(inputs, recorder)
        outcome = f"Done: {recorder.timeline.step} training steps."
        has_failed = False
    except KeyboardInterrupt:
        outcome = "Interrupted; what was written so far is valid."
        has_failed = False
        raise
    except (
        WorkerError,
        CallTimeout,
        EngineMismatch,
        RewardError,
        AgentsFailed,
        PlacementError,
        UnknownMetric,
    ) as error:
        outcome = f"Stopped: {error}"
        lines = [str(error)]
        if isinstance(error, WorkerError):
            outcome = f"Stopped: {error.headline()}"
            if error.shortage:
                lines.append(keys_that_lower(error.shortage.memory, error.role))
        lines += getattr(error, "__notes__", [])
        raise failure("\n".join(lines)) from None
    except OSError as error:  # above all a full disk
        outcome = (
            f"Stopped in step {recorder.timeline.step}: {error}. Earlier checkpoints are as "
            "they were."
        )
        raise failure(f"{outcome} They are in {recorder.run_dir}.") from None
    finally:
        # A second signal must not interrupt the report. Ray is ended last, because SIGTERM would
        # end the process during Ray's shutdown.
        handle_signals(signal.SIG_IGN)
        try:
            recorder.close(outcome)
        except OSError as error:
            say(recorder.redacted(f"{outcome} The report is not written: {error}."))
        close_routers()
        if uses_ray:
            end_ray(keep_logs=has_failed)
        handle_signals(signal.default_int_handler)


def start_ray_of(config: RunConfig, template: WorkerTemplate | None) -> None:
    """Joins or starts the Ray of a run. The workers of one that is started are forks of the
    template."""
    command = template.command if template else None
    start_ray(config.cluster_address, config.ray_kwargs.ray_init.num_cpus, command)


def handle_signals(handler: Any, numbers: Iterable[int] = ENDING_SIGNALS) -> None:
    """Gives what stops a run to `handler`. Python handles signals in the main thread alone, so in
    another one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in numbers:
        signal.signal(number, handler)


@contextlib.contextmanager
def signals_as_before() -> Iterator[None]:
    """Gives the signals that stop a run back to the handlers that they had before the block."""
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None stands for a handler that Python cannot set again
                handle_signals(handler, [number])
