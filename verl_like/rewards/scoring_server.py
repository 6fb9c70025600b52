"""What runs in a reward process: load the function once, then score one sample at a time.

Answers and errors travel to the driver as JSON text, so the driver unpickles no object of custom code.
"""

import asyncio
import ctypes
import faulthandler
import functools
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from verl_like.rewards.loader import load_reward_function

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
_FLOAT32_MAX = 3.4e38  # scores become float32
_WHAT_IS_EXPECTED = 'a finite number, {"score": finite number, ...}, or None to leave the sample out'

_reward_fn: functools.partial[Any] | None = None
_timeout_s = 0.0
_runner: asyncio.Runner | None = None
_user_file: str | None = None  # the file of the custom function, None for the rewards by data source


def serve(socket_fd: int, parent_pid: int) -> None:
    """Runs a reward process: loads the function named in the first message, then scores one sample per message.

    It answers whether the function could be loaded. For each sample it answers that it begins, and then the score.
    """
    _die_with_the_driver(parent_pid)
    os.set_inheritable(socket_fd, False)
    connection = Connection(socket_fd)
    problem = load(*connection.recv())
    connection.send_bytes(json.dumps({"load_error": problem}).encode())
    while True:
        try:
            arguments = connection.recv()
        except (EOFError, ConnectionResetError):  # the driver is gone
            return
        connection.send_bytes(b'{"begun": true}')
        connection.send_bytes(score_sample(*arguments).encode())


def load(
    path: str | None, name: str, reward_kwargs: Mapping[str, Any], timeout_s: float, plugins: Sequence[str]
) -> str | None:
    """Loads the reward function; returns why it cannot be loaded, or None."""
    global _reward_fn, _runner, _timeout_s, _user_file
    _timeout_s = timeout_s
    _runner = asyncio.Runner()
    try:
        _reward_fn = load_reward_function(path, name, reward_kwargs, plugins)
        code = getattr(inspect.unwrap(_reward_fn.func), "__code__", None)  # None for a callable object
        _user_file = None if path is None or code is None else code.co_filename
    except ValueError as error:
        return str(error)
    except BaseException as error:
        return f"custom_reward_function.path={path} fails on import: {_describe(error)['message']}"
    return None


def score_sample(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None) -> str:
    """JSON text `{"score": float | null, "extra": {...}}` or `{"error": type, "message": text, "where": text}`, and in
    both cases `"ran": [process id, start, end]` with times as of time.time()."""
    assert _reward_fn is not None and _runner is not None
    started = time.time()
    # Says where a function hangs, on standard error, just before the driver stops this process.
    faulthandler.dump_traceback_later(0.9 * _timeout_s, file=_STANDARD_ERROR)
    try:
        result = _reward_fn(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        if inspect.isawaitable(result):
            result = _runner.run(_wait_for(result))
        answer = check_result(result)
    except BaseException as error:  # custom code: even SystemExit is an error of this sample
        answer = _describe(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return json.dumps(answer | {"ran": [os.getpid(), started, time.time()]})


def check_result(result: Any) -> dict[str, Any]:
    """Turns what a reward function returned into a score and extra metrics, or into the error that it is."""
    extra: dict[str, Any] = {}
    score = _plain(result)
    if isinstance(score, dict):
        if "score" not in score:
            return _bad_return(result, "a dict without the key 'score'")
        extra = {str(key): _plain(value) for key, value in score.items() if key != "score"}
        score = _plain(score["score"])
    if score is None:
        return {"score": None, "extra": extra}
    if not isinstance(score, bool | int | float):
        return _bad_return(result, f"a {type(score).__name__}")
    if not abs(score) <= _FLOAT32_MAX:  # also NaN
        return _bad_return(result, str(float(score)))
    for key, value in extra.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            found = f"extra {key!r} of type {type(value).__name__}, which is no JSON value ({error})"
            return _bad_return(result, found)
    return {"score": float(score), "extra": extra}


def _plain(value: Any) -> Any:
    """NumPy and torch scalars as Python numbers, without importing either."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _bad_return(result: Any, found: str) -> dict[str, Any]:
    return {
        "error": "BadReturn",
        "message": f"the function returned {found} ({repr(result)[:200]}), expected {_WHAT_IS_EXPECTED}",
        "where": "",
    }


def _describe(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == _user_file] or list(frames))[-1:]
    if last[0].name == "get_reward_fn":  # no code of the user: the message says all
        last = []
    where = "".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in last)
    return {
        "error": type(error).__name__,
        "message": f"{type(error).__name__}: {error}",
        "where": where,
    }


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _die_with_the_driver(parent_pid: int) -> None:
    """A driver that is killed leaves no worker behind, not even one that hangs in C (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the signal was set
        os._exit(1)
