"""Folders that belong to a process, so that what it leaves when it is killed can be told from what
is in use."""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TextIO

_MARK = ".claimed"


def claim(folder: Path) -> TextIO:
    """Marks a folder as one of this process, until the returned file is closed or the process ends,
    however it ends."""
    partial = folder / f"{_MARK}.partial"
    mark = open(partial, "w")  # noqa: SIM115  held as long as the folder is used
    # Not lockf, whose lock another look of the same process would release. It has its name once it
    # is locked.
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.rename(partial, folder / _MARK)
    return mark


def remove_abandoned(parent: Path, pattern: str) -> None:
    """Removes the folders of this user below `parent` that a process claimed and left behind when
    it ended."""
    for mark in parent.glob(f"{pattern}/{_MARK}"):
        with contextlib.suppress(OSError):  # another process removes it, or it is claimed
            is_own = mark.lstat().st_uid == mark.parent.stat().st_uid == os.getuid()
            if is_own and mark.is_file() and not mark.parent.is_symlink():
                with open(mark) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_claimed(mark.parent)


def remove_claimed(folder: Path, patience_s: float = 0.0) -> None:
    """Removes a folder with its mark, which goes last.

    Processes that are ending may write into the folder meanwhile: it is tried again for
    `patience_s`, and what is left then is abandoned as soon as the claim is given up.
    """
    deadline = time.monotonic() + patience_s
    while True:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _MARK:
                path.unlink(missing_ok=True)
        is_empty = [path.name for path in folder.iterdir()] == [_MARK]
        if is_empty:
            (folder / _MARK).unlink()
            folder.rmdir()
        if is_empty or time.monotonic() > deadline:
            return
        time.sleep(0.1)
