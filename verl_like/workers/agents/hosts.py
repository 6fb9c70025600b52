"""STUB until the real one is merged."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Description:
    tools: list[dict[str, Any]]
    has_reward: bool


class UserCodeError(RuntimeError):
    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)


class Seat:
    is_done = False

    async def call(self, method: str, arguments: dict[str, Any], timeout_s: float) -> Any: ...
    def leave(self, failed: bool = False) -> None: ...


class Hosts:
    def __init__(self, *a: Any) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def seat(self) -> Seat: ...  # type: ignore[empty-body]


class HostedCode:
    def __init__(self, *a: Any) -> None: ...


def describe_environment(*a: Any) -> Description: ...  # type: ignore[empty-body]
def describe_harness(*a: Any) -> Description: ...  # type: ignore[empty-body]
