"""Loads the reward function that a configuration names."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from verl_like.plugins import import_plugins
from verl_like.rewards.registry import get_reward_fn
from verl_like.rewards.remote import RemoteReward


@dataclass(frozen=True)
class RewardFunctionSpec:
    """Says which reward function to load. By default it is the one that is registered for the data
    source of a sample."""

    path: str | None = None
    """A Python file, `pkg://module`, the URL of a reward server, or None for the rewards that are
    registered by data source."""
    name: str = "compute_score"
    """The name of the function `f(data_source, solution_str, ground_truth, extra_info,
    **reward_kwargs)`. It may be async."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""
    plugins: tuple[str, ...] = ()
    """Modules that register rewards by data source. They are imported if `path` is None."""
    sha256: str | None = None
    """The hash that the file at `path` must have, see `as_it_is_now`. None means any hash."""

    def as_it_is_now(self) -> Self:
        """Adds the hash of the file. So a process that is started later does not load a file that
        has been changed."""
        file = Path(self.path or "").expanduser()
        return replace(self, sha256=_hash_of(file)) if file.is_file() else self


def score_by_data_source(data_source: str, **arguments: Any) -> Any:
    """The default reward function. It calls the function that is registered for the data source of
    the sample."""
    reward_fn = get_reward_fn(data_source)
    return reward_fn(data_source=data_source, **arguments)


def takes_raw_prompt(reward_fn: Callable[..., Any]) -> bool:
    """Returns whether a function has a parameter `raw_prompt`. Such a function gets the chat
    messages of the prompt."""
    return "raw_prompt" in inspect.signature(reward_fn).parameters


def load_reward_function(
    spec: RewardFunctionSpec, timeout_s: float = 30.0
) -> functools.partial[Any]:
    """Loads a reward function and binds `reward_kwargs` to it. `timeout_s` is the deadline of a
    reward server for a sample.

    Raises ValueError if the file, the module or the function is missing, or if the function does
    not take the arguments of a reward function.
    """
    path = spec.path
    name = spec.name
    reward_kwargs = spec.reward_kwargs
    if path is None:
        import_plugins(spec.plugins)
        return functools.partial(score_by_data_source, **reward_kwargs)
    if path.startswith(("http://", "https://")):
        if spec != RewardFunctionSpec(path, plugins=spec.plugins):
            raise ValueError(
                f"custom_reward_function.name={name} and reward_kwargs={dict(reward_kwargs)} do "
                f"not reach the server {path}: remove them, and choose the function where the "
                "server is started"
            )
        return functools.partial(RemoteReward(path, timeout_s))
    module = _import_module(path, spec.sha256)
    reward_fn = getattr(module, name, None)
    if not callable(reward_fn):
        functions = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"custom_reward_function.path={path} has no function {name!r} (it has: "
            f"{', '.join(functions) or 'none'}): set custom_reward_function.name"
        )
    require_signature(reward_fn, name, f" in {path}", reward_kwargs)
    return functools.partial(reward_fn, **reward_kwargs)


def require_signature(
    reward_fn: Callable[..., Any], name: str, place: str, reward_kwargs: Mapping[str, Any]
) -> None:
    """Raises ValueError if a function cannot be called with the arguments of a reward function. The
    message names it as `name`, with its parameters and `place` behind that."""
    further: dict[str, Any] = {"raw_prompt": []} if takes_raw_prompt(reward_fn) else {}
    try:
        inspect.signature(reward_fn).bind(
            data_source="",
            solution_str="",
            ground_truth="",
            extra_info={},
            **further,
            **reward_kwargs,
        )
    except TypeError as error:
        raise ValueError(
            f"{name}{inspect.signature(reward_fn)}{place} cannot be called as a reward "
            f"function ({error}): it takes data_source, solution_str, ground_truth, extra_info "
            "and the keys of custom_reward_function.reward_kwargs "
            f"({', '.join(reward_kwargs) or 'none set'})"
        ) from error


def _hash_of(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _import_module(path: str, sha256: str | None) -> ModuleType:
    """Imports the module at `path`, which is a file or `pkg://module`. Raises ValueError if it does
    not exist, or if the file does not have the hash `sha256`."""
    if path.startswith("pkg://"):
        module_name = path.removeprefix("pkg://")
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"custom_reward_function.path={path} cannot be imported ({error}): install the "
                "module, put its folder on PYTHONPATH, or give the path of a file"
            ) from error
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"custom_reward_function.path={path}: there is no file {file}")
    if sha256 not in (None, _hash_of(file)):
        raise ValueError(
            f"custom_reward_function.path={path} is not the file any more that the run began "
            "with, so samples would be scored in two ways: restore it, and the same command "
            "continues the run"
        )
    module_name = f"custom_reward_function_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(
            f"custom_reward_function.path={path} is not a Python file: give a .py file or "
            "pkg://module"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look for their module by name
    spec.loader.exec_module(module)
    return module
