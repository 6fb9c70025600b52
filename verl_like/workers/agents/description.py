"""Describes the code of a user. It runs in a host process, because it imports that code."""

import inspect
from typing import Any

from transformers.utils import get_json_schema

from verl_like.workers.agents.host_process import NO_TOOLS, JsonObject, load


async def describe(kind: str, path: str) -> JsonObject | None:
    """Returns the fields of the `Description` of an environment class, or None for a harness.

    Raises ValueError if the code is no environment, or no harness.
    """
    key = f"agent.{kind}={path}"
    code = load(kind, path)
    if kind == "harness":
        _require_harness(key, code)
        return None
    if not inspect.isclass(code):
        raise ValueError(f"{key} is a {type(code).__name__}: give module:Class with a class")
    try:
        inspect.signature(code).bind()
    except TypeError as error:
        raise ValueError(
            f"{key} cannot be constructed without arguments ({error}): give each a default"
        ) from error
    methods = dict(inspect.getmembers(code, inspect.isfunction))
    if "reset" not in methods:
        raise ValueError(
            f"{key} has no method reset: add `def reset(self, **row)`, which returns None or text "
            "for the end of the prompt"
        )
    public = [name for name in methods if not name.startswith("_")]
    names = [name for name in public if name not in NO_TOOLS]
    if not names:
        raise ValueError(
            f"{key} has no public method beside reset and get_reward: add one for each tool"
        )
    try:
        instance = code()
    except Exception as error:
        raise ValueError(
            f"{key} cannot be constructed ({type(error).__name__}: {error})"
        ) from error
    tools = [_schema(key, name, getattr(instance, name)) for name in names]
    return {"tools": tools, "has_reward": "get_reward" in methods}


def _schema(key: str, name: str, method: Any) -> JsonObject:
    """The JSON schema of a tool. Raises ValueError if it cannot be made."""
    try:
        return get_json_schema(method)
    except Exception as error:  # also of a hint that cannot be resolved
        raise ValueError(
            f"{key}: the tool {name} cannot be described ({error}): give each parameter a type "
            "hint, and a line under `Args:` in a docstring in Google's style"
        ) from error


def _require_harness(key: str, function: Any) -> None:
    """Raises ValueError if a function cannot be called as a harness."""
    fix = "write `async def run(row, base_url, api_key)`, which returns a reward or None"
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{key} is no async function: {fix}")
    try:
        inspect.signature(function).bind(row={}, base_url="", api_key="")
    except TypeError as error:
        raise ValueError(f"{key} cannot be called as a harness ({error}): {fix}") from error
