"""What was written to a file, so that a reader can tell whether it still is as it was."""

import hashlib
import os
from pathlib import Path
from typing import Any


def file_digest(path: Path, *, sync: bool = False) -> dict[str, Any]:
    """`bytes` and `sha256` of a file; with `sync` the file is on the disk before they are known."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
