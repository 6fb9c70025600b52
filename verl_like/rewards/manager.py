"""Scores samples in reward processes, which are isolated from the driver. Every sample has a
deadline."""

import functools
import logging
import math
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import psutil

from verl_like.rewards.loader import RewardFunctionSpec
from verl_like.rewards.process import START_S, Answer, ProcessDied, RewardProcess
from verl_like.rewards.sample import RewardSample
from verl_like.rewards.scoring_server import clipped

logger = logging.getLogger(__name__)

_RESTART_S = 5.0
"""Seconds that replacing a process takes on average, besides loading the function, which
`RewardManager` measures."""
_ATTEMPTS = 3
_MAX_ERROR_CHARS = 4_000
_IDLE_BYTES = 64 << 20
"""Resident memory of a process and its supervisor before they load the function."""
_POLICIES = "reward.on_error=skip (leave the sample out) or reward.on_error=score (score it 0)"


def most_workers() -> int:
    """Returns how many reward processes fit into half of this machine's memory."""
    return max(1, psutil.virtual_memory().total // 2 // _IDLE_BYTES)


@dataclass(frozen=True)
class RewardResult:
    """The answers to B samples, in their order, and the arrays of their scores and numbers."""

    answers: list[Answer]
    """A sample that failed under on_error="score" has the score 0 and its error."""

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """(B,) float32. It is 0 for a sample that was skipped, and for one that failed under
        on_error="score"."""
        return np.array([answer.score or 0.0 for answer in self.answers], dtype=np.float32)

    @functools.cached_property
    def skipped(self) -> np.ndarray:
        """(B,) bool. True if the function returned None, or failed under on_error="skip"."""
        return np.array([answer.score is None for answer in self.answers], dtype=np.bool_)

    @functools.cached_property
    def extra(self) -> dict[str, np.ndarray]:
        """The values that the function returned beside the score, as arrays (B,) by name.

        An array of numbers is float64, with NaN for a sample without the number. Other arrays are
        of objects, with None for a sample without the value.
        """
        keys = {}  # a set that keeps its order
        for answer in self.answers:
            keys.update(dict.fromkeys(answer.extra))
        columns = {}
        for key in keys:
            values = [answer.extra.get(key) for answer in self.answers]
            if all(value is None or isinstance(value, bool | int | float) for value in values):
                numbers = [math.nan if value is None else value for value in values]
                columns[key] = np.array(numbers, dtype=np.float64)
            else:
                columns[key] = np.fromiter(values, dtype=object, count=len(values))
        return columns

    @property
    def num_errors(self) -> int:
        """The number of samples for which the function raised an error, died, or returned something
        that is no score."""
        return sum(bool(answer.error) and not answer.timed_out for answer in self.answers)

    @property
    def num_timeouts(self) -> int:
        """The number of samples without an answer within timeout_s, or with a TimeoutError.
        `num_errors` does not count them."""
        return sum(bool(answer.error) and answer.timed_out for answer in self.answers)

    @property
    def ran(self) -> list[tuple[int, float, float]]:
        """(process id, start, end) by time.time() of each sample that a process has answered."""
        return [answer.ran for answer in self.answers if answer.ran is not None]


class RewardError(RuntimeError):
    """A sample that could not be scored under on_error="fail"."""


class RewardManager:
    """Runs a reward function in `num_workers` processes. Each of them loads it once and scores one
    sample at a time.

    A process is replaced if it dies, takes longer than `timeout_s` seconds for a sample, or uses
    more than `max_memory_gb` (10^9 bytes, counting the programs that it starts). `on_error` says
    what happens with a sample that could not be scored: "fail" raises `RewardError` from `get`,
    "skip" marks it as skipped, "score" gives it the score 0. `redacted` masks secrets in errors of
    the function. Raises ValueError if the function cannot be loaded, or if the memory of the
    machine is too small for so many processes.
    """

    def __init__(
        self,
        reward_fn: RewardFunctionSpec,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        on_error: Literal["fail", "skip", "score"] = "fail",
        max_memory_gb: float = 4.0,
        redacted: Callable[[str], str] = str,
    ) -> None:
        if num_workers < 1 or not timeout_s > 0:
            raise ValueError(
                f"reward.num_workers={num_workers} must be at least 1, and "
                f"reward.timeout_s={timeout_s} above 0"
            )
        most = most_workers()
        if num_workers > most:
            raise ValueError(
                f"reward.num_workers={num_workers} processes take more than half of this "
                f"machine's memory, with {_IDLE_BYTES >> 20} MiB for each before it loads its "
                f"function: set at most {most}"
            )
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.on_error = on_error
        self.redacted = redacted
        self._is_closed = False
        self._futures: list[Future[Answer]] = []
        loaded = reward_fn.as_it_is_now()
        self._processes = [
            RewardProcess(loaded, timeout_s, max_memory_gb) for _ in range(num_workers)
        ]
        self._free: queue.SimpleQueue[RewardProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        # The threads block SIGINT, and so do the processes that they start. So an interrupt that is
        # sent to every process reaches only the driver, which then stops the others. The terminal
        # sends them none, since they have process groups of their own.
        self._threads = ThreadPoolExecutor(
            num_workers,
            initializer=signal.pthread_sigmask,
            initargs=(signal.SIG_BLOCK, {signal.SIGINT}),
        )
        started = time.monotonic()
        loading = [self._threads.submit(process.start) for process in self._processes]
        try:
            for future in loading:
                future.result()  # `start` has its own deadlines
        except ProcessDied as error:
            self.close()
            raise ValueError(
                f"custom_reward_function.path={reward_fn.path}: the worker process did not "
                f"survive loading it ({error}): load the file with python to see why"
            ) from error
        except ValueError as error:
            self.close()
            message = self.redacted(str(error))
            raise ValueError(clipped(message, _MAX_ERROR_CHARS)) from None
        except BaseException:
            self.close()
            raise
        self.restart_s = _RESTART_S + time.monotonic() - started

    def submit(self, samples: list[RewardSample]) -> "PendingRewards":
        """Starts scoring samples and returns at once."""
        pending = self.expect(len(samples))
        for index, sample in enumerate(samples):
            pending.submit(index, sample)
        return pending

    def expect(self, num_samples: int) -> "PendingRewards":
        """Returns the future result of `num_samples` samples. They are submitted to it later, in
        any order."""
        self._futures = [future for future in self._futures if not future.done()]
        return PendingRewards(self, num_samples, num_ahead=len(self._futures))

    def check(self, samples: list[RewardSample]) -> dict[str, np.ndarray]:
        """Scores samples with an example response before training. Returns `RewardResult.extra`.

        Raises RewardError if a sample fails. Under on_error="skip" the run leaves such samples out,
        so an error is raised only if all samples fail, and otherwise a warning is logged.
        """
        answers = list(self.submit(samples).answers())
        errors = [answer.error for answer in answers if answer.error]
        headline = f"the check of the reward function failed for {len(errors)} of {len(samples)}:"
        message = "\n".join([headline, *errors])
        if errors and (self.on_error != "skip" or len(errors) == len(samples)):
            raise RewardError(f"{message}\nFix the function or the rows' data_source.")
        if errors:
            logger.warning("%s\nreward.on_error=skip leaves such samples out of the run.", message)
        return RewardResult(answers).extra

    def close(self) -> None:
        """Stops the reward processes. Samples that are not scored yet are cancelled."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.stop()

    def schedule(self, sample: RewardSample) -> "Future[Answer]":
        """Has a sample scored when a process is free, and returns its future answer. Raises
        ValueError for a subclass of RewardSample, because its further fields would be lost."""
        if type(sample) is not RewardSample:
            raise ValueError(
                f"{type(sample).__name__} is no RewardSample, whose fields alone reach the "
                "function: put further ones into its extra_info"
            )
        future = self._threads.submit(self._score, sample)
        self._futures.append(future)
        return future

    def _score(self, sample: RewardSample) -> Answer:
        """Scores a sample. This runs in one of the threads. Raises RewardError if no process can be
        started any more."""
        process = self._free.get_nowait()  # there are as many processes as threads
        failed = f"the reward of {sample.name} (data_source {sample.data_source!r}) failed: "
        try:
            self._begin(process, sample)
            answer = process.answer()
        except ProcessDied as error:
            if self._is_closed:
                raise CancelledError from error
            return Answer(error=f"{failed}its worker process is gone: {error}")
        except TimeoutError:
            cause = (
                f"no answer within reward.timeout_s={self.timeout_s:g} s, its process was killed"
            )
            return Answer(
                error=f"{failed}{cause} (standard error says where it hung)", timed_out=True
            )
        finally:
            self._free.put(process)
        if not answer.error:
            return answer
        raised = clipped(self.redacted(answer.error), _MAX_ERROR_CHARS)
        return answer.model_copy(update={"error": failed + raised})

    def _begin(self, process: RewardProcess, sample: RewardSample) -> None:
        """Gives a sample to a process.

        If the process has ended while it was idle, or ends while it loads, the next attempt starts
        another one in its place. Raises RewardError after `_ATTEMPTS` attempts, or at once if the
        function cannot be loaded, and ProcessDied if the manager is closed.
        """
        causes = []
        for _ in range(_ATTEMPTS):
            try:
                return process.begin(sample)
            except ProcessDied as error:
                if self._is_closed:
                    raise
                causes.append(str(error))
                logger.warning(
                    "a reward process ended while it was idle or loading: %s; another one is "
                    "started",
                    error,
                )
            except ValueError as error:
                raise RewardError(
                    f"the reward function cannot be loaded any more: {error}"
                ) from error
        raise RewardError(
            f"{_ATTEMPTS} reward processes in a row ended before they began a sample "
            f"({'; '.join(causes)}): the machine may be out of memory, or the function's module "
            "ends its process"
        )


class PendingRewards:
    """The future result of samples. Some of them may not have been submitted yet.

    `num_ahead` is the number of earlier samples that are not scored yet. They count in the
    deadline.
    """

    def __init__(self, manager: RewardManager, num_samples: int, num_ahead: int) -> None:
        self._manager = manager
        self._num_samples = num_samples
        self._submitted: dict[int, tuple[RewardSample, Future[Answer]]] = {}
        rounds = math.ceil((num_ahead + num_samples) / manager.num_workers)
        self._longest_s = START_S + rounds * (manager.timeout_s + manager.restart_s)

    def submit(self, index: int, sample: RewardSample) -> None:
        """Starts scoring a sample. `index` is its place in the result."""
        assert index not in self._submitted, f"sample {index} was submitted already"
        future = self._manager.schedule(sample)
        self._submitted[index] = (sample, future)

    def leave_out(self, index: int, sample: RewardSample) -> None:
        """Gives a sample the score 0 without calling the function."""
        answer: Future[Answer] = Future()
        answer.set_result(Answer(score=0.0))
        self._submitted[index] = (sample, answer)

    def missing(self) -> list[int]:
        """The indices of the samples that were not submitted yet. `get` needs all samples."""
        return [index for index in range(self._num_samples) if index not in self._submitted]

    def get(self) -> RewardResult:
        """Waits for all samples and returns their answers. The deadline is long enough for samples
        that all hang.

        Raises RewardError if no process can be started any more, or if the deadline passes. Under
        on_error="fail" it is raised too for the first sample that could not be scored.
        """
        manager = self._manager
        answers = []
        errors = []
        for answer in self.answers():
            if answer.error:
                if manager.on_error == "fail":
                    for _, future in self._submitted.values():
                        future.cancel()
                    raise RewardError(f"{answer.error}\nFix the function, or set {_POLICIES}.")
                if manager.on_error == "score":
                    answer = answer.model_copy(update={"score": 0.0})
                errors.append(answer.error)
            answers.append(answer)
        if errors:
            logger.warning(
                "%d of %d samples could not be scored (reward.on_error=%s), the first: %s",
                len(errors), len(answers), manager.on_error, errors[0],
            )  # fmt: skip
        return RewardResult(answers)

    def answers(self) -> Iterator[Answer]:
        """Yields the answer of every sample, in order, as soon as it is known. Raises RewardError
        if no process can be started any more, or if the deadline passes."""
        deadline = time.monotonic() + self._longest_s
        assert not self.missing(), "a sample was never submitted"
        for _, (sample, future) in sorted(self._submitted.items()):
            seconds_left = max(0.0, deadline - time.monotonic())
            try:
                yield future.result(timeout=seconds_left)
            except CancelledError:
                raise RuntimeError(
                    f"{sample.name} was not scored: the manager was closed"
                ) from None
            except TimeoutError:
                num_missing = sum(not future.done() for _, future in self._submitted.values())
                raise RewardError(
                    f"{num_missing} of {self._num_samples} samples were not scored within "
                    f"{self._longest_s:.0f} s, the first is {sample.name}: raise "
                    "reward.num_workers, or lower reward.timeout_s"
                ) from None
