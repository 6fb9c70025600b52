"""Methods that yield: the driver gets what the ranks yield while they run, and their results at the
end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy_workers import ToyWorker

from verl_like.protocol import DataProto
from verl_like.single_controller import CallEvent, CallTimeout, WorkerDied, WorkerError
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
BATCH = DataProto.from_dict(tensors={"x": torch.arange(5)})  # rank 0 gets one row more


EVENTS: list[CallEvent] = []


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    """Shared by the tests; the last one kills it."""
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(ToyWorker), role="pair", on_call=EVENTS.append
    )
    yield group
    group.shutdown()
    pool.release()


def test_what_a_rank_yields_reaches_the_driver_while_the_call_runs(
    pair: RayWorkerGroup, tmp_path: Path
):
    told = tmp_path / "told"
    future = pair.double_and_tell.remote(BATCH, wait_for=str(told))
    parts = []
    for part in future.stream():
        parts.append(part)
        # Of rank 0 both and of rank 1 the first: it goes on when the driver knows them
        if len(parts) == 3:
            assert not future.done() and not EVENTS
            told.touch()
    assert sorted(parts) == [[0], [1, 2], [3], [4]]
    assert future.done() and sorted((e.method, e.rank) for e in EVENTS) == [
        ("double_and_tell", 0),
        ("double_and_tell", 1),
    ]
    assert list(future.stream()) == []  # nothing comes twice
    assert future.get().batch["y"].tolist() == [0, 2, 4, 6, 8]


def test_a_stream_that_nobody_looks_at_is_an_ordinary_call(pair: RayWorkerGroup):
    before = len(EVENTS)
    assert pair.double_and_tell(BATCH).get().batch["y"].tolist() == [0, 2, 4, 6, 8]
    assert len(EVENTS) == before + 2


def test_the_result_of_a_stream_is_forwarded_to_another_call(pair: RayWorkerGroup):
    doubled = pair.double_and_tell.remote(BATCH)
    assert pair.echo(doubled).batch["y"].tolist() == [0, 2, 4, 6, 8]


def test_the_local_backend_has_what_was_yielded_after_the_call():
    group = LocalWorkerGroup(ClassWithInitArgs(ToyWorker), world_size=2)
    future = group.double_and_tell.remote(BATCH)
    assert list(future.stream()) == [[0], [1, 2], [3], [4]]
    assert list(future.stream()) == []
    assert future.get().batch["y"].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(WorkerError, match="rank 1 gives up"):
        list(group.double_and_tell.remote(BATCH, fail=True).stream())


def test_a_rank_that_fails_after_it_yielded_is_one_error(pair: RayWorkerGroup):
    future = pair.double_and_tell.remote(BATCH, fail=True)
    for _ in range(2):  # asked again, it says the same
        with pytest.raises(
            WorkerError, match=r"(?s)pair rank 1 .*ArithmeticError: rank 1 gives up"
        ):
            list(future.stream())
    with pytest.raises(WorkerError, match="rank 1 gives up"):
        future.get()
    # The group goes on
    assert pair.double_and_tell(BATCH).get().batch["y"].tolist() == [0, 2, 4, 6, 8]


def test_a_stream_has_a_deadline_and_names_the_rank_that_died(pair: RayWorkerGroup, tmp_path: Path):
    pids = pair.worker_pids
    future = pair.double_and_tell.remote(BATCH, wait_for=str(tmp_path / "never"))
    with pytest.raises(CallTimeout, match=r"double_and_tell .*rank\(s\) \[1\] of 2"):
        future.get(timeout=1)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"pair rank 1 .* died during double_and_tell"):
        future.get(timeout=60)
