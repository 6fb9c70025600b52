"""The program of a reward process. It loads the function once, then scores one sample at a time.

Answers and errors are sent to the driver as JSON text, so that the driver unpickles nothing that
custom code has made. Their length is limited, whatever the function returns or raises.
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

from verl_like import registry as names
from verl_like.rewards import loader, registry, remote
from verl_like.rewards.sample import RewardSample
from verl_like.rewards.supervisor import supervise

MAX_ANSWER_BYTES = 1 << 20
"""The driver reads no longer messages of a reward process. This module never sends one."""
_MAX_EXTRA_BYTES = 64 * 1024
_MAX_ERROR_CHARS = 64_000
"""An error's text is cut to so many characters before it is sent to the driver. This may cut a
secret in two, which is then not masked. But it is not shown either, because the driver shows far
fewer characters."""
_STANDARD_ERROR = 2
_WHAT_IS_EXPECTED = (
    'a finite number, {"score": finite number, ...}, or None to leave the sample out'
)
# Messages do not name lines of these files, because they only find and call the function.
_CALLERS = (__file__, loader.__file__, names.__file__, registry.__file__, remote.__file__)


def serve(socket_fd: int, parent_pid: int, max_memory_bytes: int) -> None:
    """Runs a reward process. It loads the function that the first message names, and then scores
    the sample of each further message.

    It answers the first message with the error of loading the function, or null. It answers each
    sample twice: when it begins, and with the score. Its parent process, the supervisor, ends this
    process and the programs that it has started, at the latest when the driver ends.
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
    if problem is not None:
        problem = clipped(problem, _MAX_ERROR_CHARS)
    loaded = json.dumps({"load_error": problem})
    connection.send_bytes(loaded.encode())
    while problem is None:
        try:
            sample: RewardSample = connection.recv()
        except (EOFError, ConnectionResetError):  # the driver is gone
            return
        connection.send_bytes(b'{"begun": true}')
        started = time.time()
        # If the function hangs, its stack is written to standard error just before the driver stops
        # this process.
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=_STANDARD_ERROR)
        answer = _score(reward_fn, loop, sample)
        faulthandler.cancel_dump_traceback_later()
        ran = {"ran": [os.getpid(), started, time.time()]}
        connection.send_bytes(json.dumps(answer | ran).encode())


def _score(
    reward_fn: functools.partial[Any], loop: asyncio.AbstractEventLoop, sample: RewardSample
) -> dict[str, Any]:
    """Returns the fields of the sample's `Answer` (in `rewards/process.py`), except `ran`. Fields
    that are left out have their defaults. An error that the function raises becomes the error of
    the answer."""
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
    """Returns the fields of an `Answer` for the result of a reward function: its score and extra
    metrics, or an error if it has none."""
    extra = {}
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
    """Says what is wrong with the value of an extra metric, or returns "" if nothing is. NaN is
    allowed and means that the number is missing."""
    if isinstance(value, int | float) and abs(value) > registry.MAX_SCORE:
        return f"is {float(value)}"
    try:
        text = json.dumps(value, allow_nan=isinstance(value, float), ensure_ascii=False)
        text.encode()  # half a surrogate pair cannot be written to any file
    except (TypeError, ValueError) as error:
        return f"of type {type(value).__name__}, which is no JSON value ({error})"
    return ""


def _plain(value: Any) -> Any:
    """Turns a scalar of NumPy or torch into a Python number without importing these libraries.
    Other values are returned as they are."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def clipped(text: str, max_chars: int) -> str:
    """Returns the text in a form that can be written to a file. If it is longer than `max_chars`,
    its middle is left out."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]} ... {text[-max_chars // 2 :]}"


def _bad_return(result: Any, found: str) -> dict[str, Any]:
    """Returns the fields of an `Answer` for a result that is no score."""
    problem = f"the function returned {found} ({result!r}), expected {_WHAT_IS_EXPECTED}"
    return {"error": clipped(problem, _MAX_ERROR_CHARS)}


def _place(error: BaseException, reward_fn: functools.partial[Any]) -> str:
    """Names the last line of the function's own file in the traceback of its error, or else the
    last line of any file. Returns "" if the function was not reached."""
    function = inspect.unwrap(reward_fn.func)
    code = getattr(function, "__code__", None)  # a callable object has none
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename not in _CALLERS]
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    candidates = own or frames
    if not candidates:
        return ""
    frame = candidates[-1]
    return f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
