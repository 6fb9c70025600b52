"""Scores samples in worker processes: isolated from the driver, with a deadline for every sample."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from verl_like.rewards import worker
from verl_like.rewards.light_process import LightSpawnContext

logger = logging.getLogger(__name__)

_START_S = 60.0  # a worker starts and imports the user's module within this time
_RESTART_S = 5.0  # and, on average, is replaced within this time after a hung sample
_POOL_ATTEMPTS = 3
_POLICIES = "reward.on_error=skip (leave the sample out) or reward.on_error=score (score it 0)"


@dataclass(frozen=True)
class RewardFunctionSpec:
    """Which reward function to load, see `load_reward_function`; the defaults mean the rewards by data source."""

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSample:
    """One response to score. `solution_str` is the decoded response only, without the prompt."""

    uid: str
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None


@dataclass(frozen=True)
class RewardResult:
    """What came back for B samples, in their order."""

    scores: np.ndarray  # (B,) float32; 0 where skipped, and where on_error="score" replaced a failure
    skipped: np.ndarray  # (B,) bool: the function returned None, or failed under on_error="skip"
    extra: dict[
        str, np.ndarray
    ]  # (B,) float64 (NaN where missing) if all are numbers, else object (None where missing)
    num_errors: int  # samples whose function raised, died or returned something unusable
    num_timeouts: int  # samples that had no answer within timeout_s; not counted in num_errors
    ran: list[tuple[int, float, float]]  # (process id, start, end) of each sample that had an answer, by time.time()


class RewardError(RuntimeError):
    """A sample that could not be scored under on_error="fail"."""


@dataclass(frozen=True)
class _Answer:
    """One sample's outcome: a score (None = skip), or the error it ended with."""

    score: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    timed_out: bool = False
    ran: tuple[int, float, float] | None = None


class RewardManager:
    """Runs one reward function in `num_workers` processes that load it once.

    A sample that hangs costs its worker process, which is killed after `timeout_s` and replaced; one that crashes the
    process likewise. What then happens to the sample is `on_error`: "fail" raises `RewardError` from `get`, "skip"
    marks it as skipped, "score" scores it 0. Create it in a thread that lives as long as the manager: on
    Linux the workers are killed when the thread that started them ends.

    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(
        self,
        reward_fn: RewardFunctionSpec,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        on_error: Literal["fail", "skip", "score"] = "fail",
    ) -> None:
        if on_error not in ("fail", "skip", "score"):
            raise ValueError(f"reward.on_error is {on_error!r}, expected fail, skip or score")
        if num_workers < 1 or not timeout_s > 0:
            raise ValueError(
                f"reward.num_workers={num_workers} and reward.timeout_s={timeout_s} must be at least 1 and above 0"
            )
        self.reward_fn = reward_fn
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.on_error = on_error
        self._futures: list[ProcessFuture] = []
        self._pool = self._start_pool()
        try:
            problem = self._pool.schedule(worker.load_error).result(timeout=_START_S)
        except (TimeoutError, BrokenProcessPool, ProcessExpired) as error:
            self.close()
            raise ValueError(
                f"custom_reward_function.path={reward_fn.path}: the worker process did not survive loading it within "
                f"{_START_S:.0f} s ({type(error).__name__}): load the file with python to see why"
            ) from error
        if problem is not None:
            self.close()
            raise ValueError(problem)

    def submit(self, samples: list[RewardSample]) -> "PendingRewards":
        """Starts scoring and returns at once."""
        pending = self.expect(len(samples))
        for index, sample in enumerate(samples):
            pending.submit(index, sample)
        return pending

    def expect(self, num_samples: int) -> "PendingRewards":
        """For samples that are still to come, one after the other, in any order: see `PendingRewards.submit`."""
        self._futures = [future for future in self._futures if not future.done()]
        return PendingRewards(self, num_samples, num_ahead=len(self._futures))

    def check(self, sample: RewardSample) -> RewardResult:
        """Scores one sample (row 0 with an empty or invented response) before training.

        Raises:
            RewardError: it fails, whatever `on_error` says: a function that fails on row 0 is wrong.
        """
        pending = self.submit([sample])
        answer = pending.answers(timeout=None)[0]
        if answer.error:
            raise RewardError(f"the check of the reward function failed: {answer.error}")
        return pending.get()

    def close(self) -> None:
        """Stops the worker processes; samples that are still being scored are cancelled."""
        for future in self._futures:
            future.cancel()
        self._pool.stop()
        self._pool.join()

    def schedule(self, sample: RewardSample) -> ProcessFuture:
        """One task of the pool. A pool that broke (a worker was killed while it was idle) is replaced."""
        if not self._pool.active:
            logger.warning("the reward worker processes died while idle and are started again")
            self._pool.stop()
            self._pool.join()
            self._pool = self._start_pool()
        arguments = (sample.data_source, sample.solution_str, sample.ground_truth, sample.extra_info)
        future = self._pool.schedule(worker.score_sample, args=arguments, timeout=self.timeout_s)
        self._futures.append(future)
        return future

    def _start_pool(self) -> ProcessPool:
        spec = self.reward_fn
        arguments = (os.getpid(), spec.path, spec.name, dict(spec.reward_kwargs), self.timeout_s)
        return ProcessPool(
            self.num_workers, initializer=worker.initialize, initargs=arguments, context=LightSpawnContext()
        )


class PendingRewards:
    """Samples that are being scored, or will be."""

    def __init__(self, manager: RewardManager, num_samples: int, num_ahead: int) -> None:
        self._manager = manager
        self._samples: list[RewardSample | None] = [None] * num_samples
        self._futures: list[ProcessFuture | None] = [None] * num_samples
        self._answers: list[_Answer] | None = None
        self._error: RewardError | None = None
        rounds = math.ceil((num_ahead + num_samples) / manager.num_workers)
        self._longest_s = _START_S + rounds * (manager.timeout_s + _RESTART_S)

    def submit(self, index: int, sample: RewardSample) -> None:
        """Starts scoring the sample that comes `index`-th in the result."""
        assert self._samples[index] is None, f"sample {index} was submitted already"
        self._samples[index] = sample
        self._futures[index] = self._manager.schedule(sample)

    def missing(self) -> list[int]:
        """The samples that were not submitted yet; `get` needs all."""
        return [index for index, sample in enumerate(self._samples) if sample is None]

    def done(self) -> bool:
        """True when `get` does not wait."""
        return all(future is not None and future.done() for future in self._futures)

    def get(self, timeout: float | None = None) -> RewardResult:
        """Waits for all samples, at most `timeout` seconds (default: as long as it takes if every sample hangs).

        Raises:
            RewardError: under on_error="fail", the first sample in order that could not be scored.
            TimeoutError: samples are missing at the deadline.
        """
        answers = self.answers(timeout)
        manager = self._manager
        errors = [answer for answer in answers if answer.error]
        if errors and manager.on_error == "score":
            answers = [replace(answer, score=0.0) if answer.error else answer for answer in answers]
        if errors:
            logger.warning(
                "%d of %d samples could not be scored (reward.on_error=%s), the first: %s",
                len(errors), len(answers), manager.on_error, errors[0].error,
            )  # fmt: skip
        num_timeouts = sum(answer.timed_out for answer in errors)
        return RewardResult(
            scores=np.array([answer.score or 0.0 for answer in answers], dtype=np.float32),
            skipped=np.array([answer.score is None for answer in answers], dtype=np.bool_),
            extra=_extra_columns(answers),
            num_errors=len(errors) - num_timeouts,
            num_timeouts=num_timeouts,
            ran=[answer.ran for answer in answers if answer.ran is not None],
        )

    def answers(self, timeout: float | None) -> list[_Answer]:
        """Every sample's outcome; raises at the first error if the policy is to fail."""
        if self._error is not None:
            raise self._error
        if self._answers is None:
            deadline = time.monotonic() + (self._longest_s if timeout is None else timeout)
            answers = []
            for index in range(len(self._samples)):
                answers.append(self._wait(index, deadline))
                if answers[-1].error and self._manager.on_error == "fail":
                    self._error = RewardError(f"{answers[-1].error}\nFix the function, or set {_POLICIES}.")
                    for future in self._futures:
                        assert future is not None
                        future.cancel()
                    raise self._error
            self._answers = answers
        return self._answers

    def _wait(self, index: int, deadline: float) -> _Answer:
        sample = self._samples[index]
        assert sample is not None, f"sample {index} of {len(self._samples)} was never submitted"
        for _ in range(_POOL_ATTEMPTS):
            future = self._futures[index]
            assert future is not None
            try:
                reply = future.result(timeout=max(0.0, deadline - time.monotonic()))
            except BrokenProcessPool:  # says nothing about this sample: no worker was scoring one when the pool broke
                self._futures[index] = self._manager.schedule(sample)
                continue
            except ProcessExpired as error:
                return _failed(sample, f"the worker process died with exit code {error.exitcode}")
            except CancelledError:
                raise RuntimeError(f"sample uid {sample.uid!r} was not scored: the manager was closed") from None
            except TimeoutError as error:
                if future.done() and future.exception() is error:  # this sample's own deadline
                    limit = f"reward.timeout_s={self._manager.timeout_s:g} s"
                    cause = f"no answer within {limit}, its process was killed (standard error says where it hung)"
                    return _failed(sample, cause, timed_out=True)
                num_missing = sum(future is None or not future.done() for future in self._futures)
                raise TimeoutError(
                    f"{num_missing} of {len(self._samples)} samples were not scored in time, the first is uid "
                    f"{sample.uid!r}: raise reward.num_workers, or lower reward.timeout_s"
                ) from None
            answer = json.loads(reply)
            if "error" in answer:
                where = f"\n  at {answer['where']}" if answer["where"] else ""
                return _failed(sample, f"{answer['message']}{where}", ran=tuple(answer["ran"]))
            return _Answer(score=answer["score"], extra=answer["extra"], ran=tuple(answer["ran"]))
        return _failed(sample, f"its worker processes died {_POOL_ATTEMPTS} times")


def _failed(
    sample: RewardSample, cause: str, timed_out: bool = False, ran: tuple[int, float, float] | None = None
) -> _Answer:
    text = f"the reward of sample uid {sample.uid!r} (data_source {sample.data_source!r}) failed: {cause}"
    return _Answer(error=text, timed_out=timed_out, ran=ran)


def _extra_columns(answers: list[_Answer]) -> dict[str, np.ndarray]:
    """The functions' extra metrics, one array of B per key."""
    columns = {}
    for key in dict.fromkeys(key for answer in answers for key in answer.extra):
        values = [answer.extra.get(key) for answer in answers]
        if all(value is None or isinstance(value, bool | int | float) for value in values):
            columns[key] = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
        else:
            columns[key] = np.fromiter(values, dtype=object, count=len(values))
    return columns
