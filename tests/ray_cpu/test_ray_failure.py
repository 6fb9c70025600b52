"""What the driver sees when a process dies or does not answer."""

import os
import signal
import time

import pytest
from toy_workers import ToyWorker

from verl_like.single_controller import CallTimeout, WorkerDied, WorkerError
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def pair():
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ToyWorker), role="pair")
    yield group
    group.shutdown()
    pool.release()


def assert_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    for pid in pids:
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_killed_rank_is_named_and_its_waiting_peer_is_stopped(pair):
    pair.init_process_group()
    pids, nodes = pair.worker_pids, pair.worker_nodes
    future = pair.reduce_while_rank_sleeps.remote(1)  # rank 0 waits in the collective
    with pytest.raises(CallTimeout):
        future.get(timeout=1)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"pair rank 1 .* died during reduce_while_rank_sleeps") as caught:
        future.get(timeout=60)
    error = caught.value
    assert (error.role, error.rank, error.node, error.pid) == ("pair", 1, nodes[1], pids[1])
    assert f"worker-*-{pids[1]}.err" in error.cause
    assert_dead(pids)
    with pytest.raises(WorkerDied, match="died during reduce_while_rank_sleeps"):
        pair.place()


def crash_on_rank_zero(worker) -> None:
    if worker.rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_the_last_lines_of_a_crashed_workers_log_are_in_the_error(pair):
    pair.place()
    with pytest.raises(WorkerDied, match=r"pair rank 0 .* died[\s\S]*Segmentation fault[\s\S]*crash_on_rank_zero"):
        pair.execute_with_func_generator(crash_on_rank_zero)
    assert_dead(pair.worker_pids)


def test_an_error_of_one_rank_does_not_wait_for_the_rank_that_waits_for_it(pair):
    pair.init_process_group()
    with pytest.raises(WorkerError, match=r"pair rank 1 .* ZeroDivisionError") as caught:
        pair.execute_with_func_generator.remote(fail_before_the_collective).get(timeout=60)
    assert not isinstance(caught.value, WorkerDied)
    assert "rank(s) [0] are still in execute_with_func_generator" in caught.value.__notes__[0]


def fail_before_the_collective(worker):
    if worker.rank == 1:
        raise ZeroDivisionError
    return worker.sum_of_ranks()


def test_a_call_that_takes_too_long_names_role_method_and_seconds(pair):
    pair.place()
    future = pair.sleep.remote(3)
    with pytest.raises(
        CallTimeout, match=r"pair\.sleep did not finish within 0\.2 s: waiting for rank\(s\) \[0, 1\] of 2"
    ):
        future.get(timeout=0.2)
    with pytest.raises(CallTimeout):
        future.get(timeout=-1)  # what is left of a deadline that has passed
    assert not future.done()
    assert len(future.get()) == 2 and future.done(), "a timeout is not the call's result"


def test_the_groups_deadline_holds_where_get_names_none(pair):
    pair.place()
    pair.deadline_s = 0.5
    with pytest.raises(CallTimeout, match=r"within 0\.5 s"):
        pair.sleep(3)
