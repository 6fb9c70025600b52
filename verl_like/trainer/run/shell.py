"""Runs any trainer: checks its inputs, records the run, starts Ray, trains, and ends all processes.

A trainer consists of a schema with its rules (trainer/config), `check_inputs`, `fit`, and a
`Display`.
"""

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from verl_like.rewards.manager import RewardError
from verl_like.single_controller.failure import CallTimeout, PlacementError, WorkerError
from verl_like.single_controller.ray.start import (
    cluster_address,
    end_ray,
    require_cluster,
    start_ray,
)
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.memory.keys import keys_that_lower
from verl_like.trainer.memory.pools import check_memory
from verl_like.trainer.run.display import Display
from verl_like.trainer.run.errors import EngineMismatch
from verl_like.trainer.run.messages import say
from verl_like.trainer.run.run_recorder import RunRecorder, UnknownMetric
from verl_like.trainer.run.tracking import require_trackers
from verl_like.trainer.run.worker_template import WorkerTemplate
from verl_like.trainer.state.resume import find_run
from verl_like.trainer.state.run_state import RecordState
from verl_like.workers.rollout.router import close_routers


def run(
    config: RunConfig,
    check_inputs: Callable[[Any, contextlib.ExitStack], Any],
    fit: Callable[[Any, RunRecorder], None],
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
            require_trackers(config.trainer.logger)
            if address := cluster_address(config.ray_kwargs.ray_init.address):
                require_cluster(address)
            inputs = check_inputs(config, cleanup)
            memory = check_memory(config)
            resumed, notes = find_run(inputs.config, state_schema)
            try:
                recorder = RunRecorder(inputs.config, display, resumed)
            except OSError as error:
                folder = f"trainer.default_local_dir={inputs.config.trainer.default_local_dir}"
                raise ValueError(
                    f"{folder} cannot be written ({error}): make room there, or give another."
                ) from error
        except (ValueError, RewardError, OSError) as error:
            return say(config.redaction()(str(error)), 2)
        except KeyboardInterrupt:
            return say("interrupted before the run started", 130)
        for note in [*inputs.notes, *memory, *notes]:
            recorder.say(note)
        return train(inputs, fit, recorder, template)


def train(
    inputs: Any,
    fit: Callable[[Any, RunRecorder], None],
    recorder: RunRecorder,
    template: WorkerTemplate | None = None,
) -> int:
    """Starts Ray and trains until the last step. Returns the exit code."""
    outcome = "Failed with an unexpected error; standard error has the traceback."
    has_failed = True
    try:
        recorder.say("Starting Ray and the workers ...")
        ray_init = inputs.config.ray_kwargs.ray_init
        start_ray(
            cluster_address(ray_init.address),
            ray_init.num_cpus,
            template.command if template else None,
        )
        signal.signal(signal.SIGTERM, recorder.terminate)
        fit(inputs, recorder)
        outcome = f"Done: {recorder.timeline.step} training steps."
        has_failed = False
        return 0
    except KeyboardInterrupt:
        outcome = "Interrupted; what was written so far is valid."
        has_failed = False
        return 130
    except (
        WorkerError,
        CallTimeout,
        EngineMismatch,
        RewardError,
        PlacementError,
        UnknownMetric,
    ) as error:
        outcome = f"Stopped: {error.headline() if isinstance(error, WorkerError) else error}"
        lines = [str(error)]
        if isinstance(error, WorkerError) and error.shortage:
            lines.append(keys_that_lower(error.shortage.memory, error.role))
        lines += getattr(error, "__notes__", [])
        message = "\n".join(lines)
        return say(recorder.redacted(message), 1)
    except OSError as error:  # above all a full disk
        outcome = (
            f"Stopped in step {recorder.timeline.step}: {error}. Earlier checkpoints are as "
            "they were."
        )
        return say(recorder.redacted(f"{outcome} They are in {recorder.run_dir}."), 1)
    finally:
        # A second signal must not interrupt the report. Ray is ended last, because SIGTERM would
        # end the process during Ray's shutdown.
        handle_signals(signal.SIG_IGN)
        try:
            recorder.close(outcome)
        except OSError as error:
            say(recorder.redacted(f"{outcome} The report is not written: {error}."))
        close_routers()
        end_ray(keep_logs=has_failed)
        handle_signals(signal.default_int_handler)


def handle_signals(handler: Any) -> None:
    """Has `handler` called at an interrupt and at SIGTERM, which stop a run."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
