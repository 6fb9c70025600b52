"""Runs any trainer: checks its inputs, records the run, starts Ray, trains, and ends every process.

A trainer consists of a schema and its rules (trainer/config), its `check_inputs`, its `fit`, and
its `Display`.
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

    All input is checked before Ray starts. However the run ends, the processes it started are gone
    and what it wrote so far is valid.

    Args:
        config: a configuration that keeps its rules.
        check_inputs: returns what the trainer needs, or raises ValueError or RewardError for wrong
            input. What it returns has `notes` for the start of the run, and a `config` to record,
            in which is filled in what depends on the data. The stack stops what it starts.
        fit: trains to the end, after Ray was started.
        display: what the record shows.
        template: the process of which the workers of a Ray that is started here are forks.
        state_schema: what the trainer keeps in a checkpoint beside the models.
    """
    # SIGTERM, which ends a pre-empted run, is an interrupt too. A shell's background jobs ignore
    # interrupts by default.
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
    """Starts Ray and trains to the end; returns the exit code."""
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
        advice = []
        if isinstance(error, WorkerError) and error.shortage:
            advice.append(keys_that_lower(error.shortage.memory, error.role))
        return say(
            recorder.redacted("\n".join([str(error), *advice, *getattr(error, "__notes__", [])])), 1
        )
    except OSError as error:  # a full disk, above all
        outcome = (
            f"Stopped in step {recorder.timeline.step}: {error}. Earlier checkpoints are as "
            "they were."
        )
        return say(recorder.redacted(f"{outcome} They are in {recorder.run_dir}."), 1)
    finally:
        # A second signal must not stop the report. During Ray's shutdown SIGTERM ends the process,
        # so it comes last.
        handle_signals(signal.SIG_IGN)
        try:
            recorder.close(outcome)
        except OSError as error:
            say(recorder.redacted(f"{outcome} The report is not written: {error}."))
        close_routers()
        end_ray(keep_logs=has_failed)
        handle_signals(signal.default_int_handler)


def handle_signals(handler: Any) -> None:
    """Gives what stops a run, an interrupt or SIGTERM, to `handler`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
