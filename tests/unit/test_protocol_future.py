"""Futures wait late, and keep what they got."""

from collections.abc import Callable
from typing import Any

import pytest

from verl_like.protocol import Future, PendingCall


class StoredCall(PendingCall):
    """A finished or late call whose ranks returned `outputs`; notes the time limits of its
    waits."""

    def __init__(self, outputs: list[Any], finished: bool = True) -> None:
        self.outputs, self.finished = outputs, finished
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None) -> list[Any]:
        self.timeouts.append(timeout)
        if not self.finished:
            raise TimeoutError("not finished")
        return self.outputs

    def done(self) -> bool:
        return self.finished


def test_the_value_is_collected_once():
    call = StoredCall([1, 2])
    future: Future[int] = Future(call, sum)
    assert (future.get(), future.get(timeout=1.0)) == (3, 3)
    assert call.timeouts == [None]
    call.finished = False
    assert future.done()


@pytest.mark.parametrize("where", ["call", "collect"])
def test_an_error_is_raised_at_every_get_and_the_call_is_waited_for_once(where: str):
    call = StoredCall([1])

    def fail(*_: Any) -> Any:
        call.timeouts.append(None)
        raise RuntimeError("worker failed")

    collect: Callable[[list[Any]], Any] = sum
    if where == "call":
        call.wait = fail  # type: ignore[method-assign]
    else:
        collect = fail
    future = Future(call, collect)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker failed"):
            future.get()
    assert future.done() and call.timeouts.count(None) == (1 if where == "call" else 2)


def test_a_timeout_is_not_kept():
    call = StoredCall([1, 2], finished=False)
    future = Future(call, sum)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.5)
    assert not future.done() and call.timeouts == [0.5]
    call.finished = True
    assert future.get() == 3
