"""What runs in a reward process: load the function once, then score one sample at a time.

Answers and errors travel to the driver as JSON text, so the driver unpickles no object of custom
code. Their length is bounded, whatever the function returns or raises.
"""

import asyncio
import faulthandler
import functools
import inspect
import json
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from verl_like.rewards import loader, registry, remote
from verl_like.rewards.sample import RewardSample
from verl_like.rewards.supervisor import supervise

MAX_ANSWER_BYTES = 1 << 20
"""A longer message of a reward process is refused unread; none that this module makes is."""
_MAX_EXTRA_BYTES = 64 * 1024
_MAX_ERROR_CHARS = 64_000
"""What the driver is given of an error's text. It masks secrets and then shows far less, so that no
part of a secret is left where this is cut."""
_STANDARD_ERROR = 2
_WHAT_IS_EXPECTED = (
    'a finite number, {"score": finite number, ...}, or None to leave the sample out'
)
# Only find and call the function
_CALLERS = (__file__, loader.__file__, registry.__file__, remote.__file__)


def serve(socket_fd: int, parent_pid: int, max_memory_bytes: int) -> None:
    """Runs a reward process: loads the function named in the first message, then scores one sample
    per message.

    It answers whether the function could be loaded. For each sample it answers that it begins, and
    then the score. A process above this one, its supervisor, ends it and the programs that it
    started, at the latest with the driver.
    """
    supervise(parent_pid, max_memory_bytes)
    os.set_inheritable(socket_fd, False)
    connection = Connection(socket_fd)
    loop = asyncio.new_event_loop()
    spec, timeout_s = connection.recv()
    problem = None
    try:
        reward_fn = loader.load_reward_function(spec, timeout_s)
    except ValueError as error:
        problem = str(error)
    except BaseException as error:
        problem = (
            f"custom_reward_function.path={spec.path} fails on import: "
            f"{type(error).__name__}: {error}"
        )
    connection.send_bytes(
        json.dumps({"load_error": problem and clipped(problem, _MAX_ERROR_CHARS)}).encode()
    )
    while problem is None:
        try:
            sample: RewardSample = connection.recv()
        except (EOFError, ConnectionResetError):  # the driver is gone
            return
        connection.send_bytes(b'{"begun": true}')
        started = time.time()
        # Says where a function hangs, on standard error, just before the driver stops this process.
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=_STANDARD_ERROR)
        answer = _score(reward_fn, loop, sample)
        faulthandler.cancel_dump_traceback_later()
        ran = {"ran": [os.getpid(), started, time.time()]}
        connection.send_bytes(json.dumps(answer | ran).encode())


def _score(
    reward_fn: functools.partial[Any], loop: asyncio.AbstractEventLoop, sample: RewardSample
) -> dict[str, Any]:
    """The fields of the sample's `Answer`, but the time that it took."""
    further = {"raw_prompt": sample.raw_prompt} if loader.takes_raw_prompt(reward_fn) else {}
    try:
        result = reward_fn(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
            **further,
        )
        if inspect.isawaitable(result):
            result = loop.run_until_complete(result)
        return _checked(result)
    except BaseException as error:  # custom code: even SystemExit is an error of this sample
        problem = f"{type(error).__name__}: {error}{_place(error, reward_fn)}"
        return {
            "error": clipped(problem, _MAX_ERROR_CHARS),
            "timed_out": isinstance(error, TimeoutError),
        }


def _checked(result: Any) -> dict[str, Any]:
    """Turns what a reward function returned into a score and extra metrics, or into the error that
    it is."""
    extra: dict[str, Any] = {}
    score = _plain(result)
    if isinstance(score, dict):
        if "score" not in score:
            return _bad_return(result, "a dict without the key 'score'")
        extra = {str(key): _plain(value) for key, value in score.items() if key != "score"}
        score = _plain(score["score"])
    if score is not None and not isinstance(score, bool | int | float):
        return _bad_return(result, f"a {type(score).__name__}")
    if score is not None and not abs(score) <= registry.MAX_SCORE:  # also NaN
        return _bad_return(result, str(float(score)))
    for key, value in extra.items():
        if problem := _problem_of_extra(value) or _problem_of_extra(key):
            return _bad_return(result, f"extra {key!r} {problem}")
    if len(json.dumps(extra)) > _MAX_EXTRA_BYTES:
        return _bad_return(result, f"extra metrics of more than {_MAX_EXTRA_BYTES} bytes in JSON")
    return {"score": None if score is None else float(score), "extra": extra}


def _problem_of_extra(value: Any) -> str:
    """What is wrong with the value of an extra metric; empty if nothing is. NaN is a missing
    number."""
    if isinstance(value, int | float) and abs(value) > registry.MAX_SCORE:
        return f"is {float(value)}"
    try:
        text = json.dumps(value, allow_nan=isinstance(value, float), ensure_ascii=False)
        text.encode()  # half a surrogate pair cannot be written to any file
    except (TypeError, ValueError) as error:
        return f"of type {type(value).__name__}, which is no JSON value ({error})"
    return ""


def _plain(value: Any) -> Any:
    """NumPy and torch scalars as Python numbers, without importing either."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def clipped(text: str, max_chars: int) -> str:
    """A text that can be written to a file, with its middle left out where it is longer."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]} ... {text[-max_chars // 2 :]}"


def _bad_return(result: Any, found: str) -> dict[str, Any]:
    problem = f"the function returned {found} ({result!r}), expected {_WHAT_IS_EXPECTED}"
    return {"error": clipped(problem, _MAX_ERROR_CHARS)}


def _place(error: BaseException, reward_fn: functools.partial[Any]) -> str:
    """The last line of the function's own file that led to the error, or else the last one below
    its call."""
    code = getattr(inspect.unwrap(reward_fn.func), "__code__", None)  # None for a callable object
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if each.filename not in _CALLERS
    ]
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (own or frames)[-1:]
    return "".join(
        f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in last
    )
