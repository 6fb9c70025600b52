"""Reads the files of a run that have a JSON object in each line."""

import contextlib
import json
from typing import Any


def readable_rows(content: bytes) -> list[dict[str, Any]]:
    """The objects that have a "step". A line that cannot be read is left out, for instance the last
    one of a file that is being written."""
    rows = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and "step" in row:
                rows.append(row)
    return rows
