"""Kills a process at a chosen operation on the file system."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "os.fsync",
}


def in_a_fork(action: Callable[..., object], *arguments: Any) -> int:
    """The exit code of the action in a process of its own; of one that was killed the negative
    signal."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        action(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def die_at(operation: int | str, file: Path, within: str = "") -> None:
    """This process is killed before an operation from now on, its number from 1 or its name; `file`
    is given the name.

    Files count that are opened with `within` in their path. One that is opened to be written anew
    is then empty.
    """
    descriptor, count, fsync = os.open(file, os.O_WRONLY | os.O_CREAT), 0, os.fsync

    def die(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, operation
        if event not in OPERATIONS or (event == "open" and within not in str(arguments[0])):
            return
        count += 1
        name = " ".join([event, *(Path(str(each)).name for each in arguments[:1])])
        if operation in (count, name):
            operation = 0
            os.write(descriptor, name.encode())
            if event == "open" and arguments[2] & os.O_TRUNC:
                os.open(arguments[0], arguments[2], 0o644)
            os.kill(os.getpid(), signal.SIGKILL)

    # Python has no audit event for it
    os.fsync = lambda file: (sys.audit("os.fsync"), fsync(file))[1]
    sys.addaudithook(die)
