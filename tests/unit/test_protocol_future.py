"""Futures fetch late, fetch only what they need, and keep what they got."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from protocol_batches import plain_rows

from verl_like.protocol import DataProto, DataProtoFuture, Future, Part


@dataclass
class Header:
    num_rows: int


class StoredCall:
    """A finished or late call whose results are in a dict, as they would be in an object store; counts the fetches."""

    def __init__(self, outputs: list[Any], finished: bool = True) -> None:
        self.store = {f"payload {rank}": output for rank, output in enumerate(outputs)}
        self.finished = finished
        self.fetched: list[str] = []
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None) -> list[Any]:
        return self.fetch(list(self.store), timeout)

    def done(self) -> bool:
        return self.finished

    def parts(self) -> list[Part]:
        return [Part(Header(len(output)), name) for name, output in self.store.items()]

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        self.timeouts.append(timeout)
        if not self.finished:
            raise TimeoutError("not finished")
        if isinstance(references[0], Header):
            return list(references)
        self.fetched += references
        return [self.store[name] for name in references]


def make_batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"0-{i}" for i in range(rows)]})


def split_future(sizes: list[int]) -> tuple[DataProto, StoredCall, DataProtoFuture]:
    """A batch, and a call whose ranks returned `sizes` rows of it each."""
    data = make_batch(sum(sizes))
    parts, first = [], 0
    for size in sizes:
        parts.append(data.slice(first, first + size))
        first += size
    call = StoredCall(parts)
    return data, call, DataProtoFuture(call, DataProto.concat)


def test_the_value_is_collected_once():
    call = StoredCall([1, 2])
    future: Future[int] = Future(call, sum)
    assert (future.get(), future.get(timeout=1.0)) == (3, 3)
    assert call.fetched == ["payload 0", "payload 1"] and call.timeouts == [None]
    call.finished = False
    assert future.done()


@pytest.mark.parametrize("where", ["call", "collect"])
def test_an_error_is_raised_at_every_get_and_fetched_once(where: str):
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


@pytest.mark.parametrize("sizes", [[2, 4], [3, 3], [6], [1, 0, 5], [0, 0], [1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_chunks_are_the_rows_of_the_whole_and_fetch_only_the_parts_they_overlap(sizes: list[int], chunks: int):
    data, call, future = split_future(sizes)
    pieces = future.chunk(chunks)
    assert call.timeouts == []
    owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    width = len(data) // chunks
    for index, piece in enumerate(pieces):
        call.fetched.clear()
        expected = data.slice(index * width, (index + 1) * width)
        assert piece.get().equal(expected)
        needed = sorted(set(owner[index * width : (index + 1) * width])) or [0]
        assert call.fetched == [f"payload {rank}" for rank in needed]
    assert DataProtoFuture.concat(pieces).get().equal(data)


def test_a_chunk_does_not_alias_what_was_fetched():
    _, call, future = split_future([2, 2])
    chunk = future.chunk(2)[0].get()
    chunk.batch["x"][0] = 99
    assert call.store["payload 0"].batch["x"].tolist() == [0, 1]


def test_chunks_of_chunks_are_finer_chunks():
    data, call, future = split_future([5, 7])
    pieces = [piece for half in future.chunk(2) for piece in half.chunk(3)]
    assert [plain_rows(piece.get()) for piece in pieces] == [plain_rows(part) for part in data.chunk(6)]
    call.fetched.clear()
    assert future.chunk(2)[1].chunk(3)[2].get().batch["x"].tolist() == [10, 11]
    assert call.fetched == ["payload 1"]


def test_rows_that_do_not_divide_are_refused_by_the_chunk():
    _, _, future = split_future([2, 3])
    with pytest.raises(ValueError, match="5 rows do not divide into 2"):
        future.chunk(2)[0].get()
    with pytest.raises(ValueError, match="positive"):
        future.chunk(0)


def test_concatenated_futures_forward_all_parts_in_order():
    first, first_call, one = split_future([1, 2])
    second, second_call, two = split_future([3])
    both = DataProtoFuture.concat([one, two])
    assert both.parts == first_call.parts() + second_call.parts()
    assert both.get().equal(DataProto.concat([first, second]))
    first_call.fetched.clear()
    assert DataProtoFuture.concat([one, one]).chunk(3)[1].get().batch["x"].tolist() == [2, 0]
    assert first_call.fetched == ["payload 1", "payload 0"]
    second_call.finished = False
    assert one.done() and not DataProtoFuture.concat([one, DataProtoFuture(second_call, DataProto.concat)]).done()
    with pytest.raises(ValueError, match="empty list"):
        DataProtoFuture.concat([])


def test_a_chunk_cannot_be_handed_on_by_reference():
    _, _, future = split_future([2, 2])
    assert [part.payload for part in future.parts] == ["payload 0", "payload 1"]
    with pytest.raises(ValueError, match="pass the whole future"):
        _ = future.chunk(2)[0].parts


def test_the_deadline_covers_headers_and_payloads_together():
    _, call, future = split_future([2, 2])
    future.chunk(2)[1].get(timeout=100.0)
    headers, payloads = call.timeouts
    assert headers == 100.0 and 0.0 <= payloads <= 100.0
