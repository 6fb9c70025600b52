"""Marks folders as belonging to a process. So folders that are in use can be told from those that a
killed process left."""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TextIO

_MARK = ".claimed"


def claim(folder: Path) -> TextIO:
    """Marks a folder as belonging to this process, until the returned file is closed or the process
    ends in any way.

    The mark gets the name that `remove_abandoned` looks for only when it is locked. So a mark that
    is found unlocked has no living owner.
    """
    partial = folder / f"{_MARK}.partial"
    mark = open(partial, "w")  # noqa: SIM115  held as long as the folder is used
    # A lock of lockf would be released if this process opened and closed the file once more.
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.rename(partial, folder / _MARK)
    return mark


def remove_abandoned(parent: Path, pattern: str) -> None:
    """Removes the folders of this user in `parent` that match `pattern` and were claimed by a
    process that has ended."""
    for mark in parent.glob(f"{pattern}/{_MARK}"):
        folder = mark.parent
        # OSError is raised if the folder is claimed, or another process removes it too.
        with contextlib.suppress(OSError):
            is_own = mark.lstat().st_uid == folder.stat().st_uid == os.getuid()
            if is_own and mark.is_file() and not folder.is_symlink():
                with open(mark) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_claimed(folder)


def remove_claimed(folder: Path, patience_s: float = 0.0) -> None:
    """Removes a folder that this process has claimed. The mark is removed last.

    Processes that are ending may still write into the folder. So it is tried again for `patience_s`
    seconds. If the folder is not empty then, it stays, and `remove_abandoned` can remove it once
    the claim has ended.
    """
    deadline = time.monotonic() + patience_s
    while True:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _MARK:
                path.unlink(missing_ok=True)
        is_empty = os.listdir(folder) == [_MARK]
        if is_empty:
            (folder / _MARK).unlink()
            folder.rmdir()
        if is_empty or time.monotonic() > deadline:
            return
        time.sleep(0.1)
