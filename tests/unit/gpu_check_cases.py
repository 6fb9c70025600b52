"""Cases that end in every way a case of the GPU check can end."""

import os
import time
from typing import Any


def gives_a_row(report: Any, device: str, *, value: float) -> None:
    report.row(f"a row on {device}", "s", [value])


def raises(report: Any, device: str) -> None:
    report.row("before the error", "s", [1.0])
    raise MemoryError("no room for 3 GiB")


def dies(report: Any, device: str) -> None:
    os._exit(9)


def hangs(report: Any, device: str) -> None:
    time.sleep(600)


def agrees(report: Any, device: str, *, value: float) -> None:
    report.same("the loss", f"value {value}", value, 1e-2)
