"""Files that somebody else may have written: read as regular files alone, and compared with what
they were."""

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import Any

from pydantic_core import from_json


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading. Raises OSError for anything else: to open a FIFO waits for
    its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_text(path: Path, max_bytes: int) -> str:
    """Returns the text of a file. Raises OSError if it cannot be read or is longer, and ValueError
    if it is not UTF-8."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{path} has more than {max_bytes} bytes")
    return content.decode()


def read_json(path: Path, max_bytes: int) -> Any:
    """Returns the value of a JSON file. Raises what `read_text` raises, and ValueError for a text
    that is not JSON or is nested too deeply."""
    return from_json(read_text(path, max_bytes))


def cut_file(path: Path, num_bytes: int) -> None:
    """Shortens a regular file to at most `num_bytes`. Raises OSError for any other file, a link
    included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        os.ftruncate(descriptor, min(num_bytes, found.st_size))
    finally:
        os.close(descriptor)


def file_digest(path: Path, *, sync: bool = False) -> dict[str, Any]:
    """Returns `bytes` and `sha256` of a file. With `sync` the file is on the disk before they are
    known."""
    with open_regular(path) as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
