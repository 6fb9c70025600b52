"""Writes a reward function that is an object of the user's process as a file, from which the reward
processes load it as any other."""

import base64
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

FUNCTION_NAME = "reward_fn"
"""The name of the function in the file."""
MAX_BYTES = 16 << 20
"""Most bytes of the pickled function, which each reward process reads when it starts."""
_FILE = '''"""Loads the reward function that train() was given, with what it refers to."""

import base64

import cloudpickle

{name} = cloudpickle.loads(base64.b64decode("{content}"))

# Its source:
#
{source}
'''


def write_reward_function(reward_fn: Callable[..., Any], folder: Path) -> Path:
    """Writes the function into a new file of the folder and returns the file.

    cloudpickle copies the code of a function that is defined in a script, a notebook or another
    function, with the global variables that it uses. A function of a module is imported from there.

    Raises ValueError if the function refers to what cannot be copied, or to more than `MAX_BYTES`.
    """
    shown = f"train(reward_fn={reward_fn!r})"
    try:
        pickled = cloudpickle.dumps(reward_fn)
    # Objects raise what they like when they are pickled.
    except Exception as error:
        raise ValueError(
            f"{shown} cannot be sent to the reward processes ({type(error).__name__}: {error}), "
            "for it refers to an object that belongs to this process: make the object within the "
            "function, or write the function to a file and set custom_reward_function.path"
        ) from error
    if len(pickled) > MAX_BYTES:
        raise ValueError(
            f"{shown} has {len(pickled) / 1e6:.1f} MB with what it refers to, and at most "
            f"{MAX_BYTES / 1e6:.1f} MB are sent to each reward process: read large data from a "
            "file within the function"
        )
    content = base64.b64encode(pickled).decode()
    lines = [f"# {line}".rstrip() for line in _source_of(reward_fn).splitlines()]
    file = folder / f"{FUNCTION_NAME}.py"
    file.write_text(
        _FILE.format(name=FUNCTION_NAME, content=content, source="\n".join(lines)), encoding="utf-8"
    )
    return file


def _source_of(reward_fn: Callable[..., Any]) -> str:
    """The source of the function, as a note for those who read the file. The note is the same
    each time, for a run goes on only with the file that it began with."""
    try:
        return inspect.getsource(reward_fn)
    except (OSError, TypeError):
        return "not known to Python"
