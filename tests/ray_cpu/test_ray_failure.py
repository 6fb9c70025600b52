"""What the driver sees when a process dies or does not answer."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ray.exceptions import RayTaskError
from toy_workers import ToyWorker

from verl_like.protocol import DataProto
from verl_like.single_controller import CallTimeout, WorkerDied, WorkerError
from verl_like.single_controller.failure import WorkerStopped
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    node_watch,
    process_handles,
)
from verl_like.single_controller.ray import call as ray_call
from verl_like.single_controller.shortage import Shortage

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def pair():
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ToyWorker), role="pair")
    yield group
    group.shutdown()
    pool.release()


def assert_dead(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=10)
    # A child of a killed process stays a zombie where no process of the machine takes it over.
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_rank_is_named_and_its_waiting_peer_is_stopped(pair):
    pair.init_process_group()
    pids, nodes = pair.worker_pids, pair.worker_nodes
    future = pair.reduce_while_rank_sleeps.remote(1)  # rank 0 waits in the collective
    with pytest.raises(CallTimeout):
        future.get(timeout=1)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match=r"pair rank 1 .* died during reduce_while_rank_sleeps"
    ) as caught:
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
    with pytest.raises(
        WorkerDied, match=r"pair rank 0 .* died[\s\S]*Segmentation fault[\s\S]*crash_on_rank_zero"
    ):
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
    future = pair.sleep.remote(1.5)
    with pytest.raises(
        CallTimeout,
        match=r"pair\.sleep did not finish within 0\.2 s: waiting for rank\(s\) \[0, 1\] of 2",
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


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (node_watch, process_handles, ray_call):
        monkeypatch.setattr(module, "LOOK_S", 1.0)


def stop_in(pid: int, method: str) -> None:
    """Stops a rank as soon as it runs the method, which the title of its process says."""
    deadline = time.monotonic() + 60
    while method not in " ".join(psutil.Process(pid).cmdline()):
        assert time.monotonic() < deadline
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.usefixtures("looks_often")
def test_a_stopped_rank_is_named_and_killed_with_its_waiting_peer(pair):
    pair.init_process_group()
    pids = pair.worker_pids
    future = pair.reduce_while_rank_sleeps.remote(1)
    stop_in(pids[1], "reduce_while_rank_sleeps")
    with pytest.raises(WorkerStopped) as caught:
        future.get(timeout=100)
    message = str(caught.value)
    where = f"pair rank 1 (node {pair.worker_nodes[1]}, pid {pids[1]})"
    assert message.startswith(
        f"{where} was stopped, such as by SIGSTOP, during reduce_while_rank_sleeps;"
    )
    assert (
        f"process {pids[1]} (ray::pair rank 1 reduce_while_rank_sleeps) was stopped for at least"
        in message
    )
    assert_dead(pids)
    with pytest.raises(WorkerStopped):
        pair.place()


@pytest.mark.proof
@pytest.mark.usefixtures("looks_often")
def test_a_process_that_a_rank_started_and_that_is_stopped_is_named_in_a_stream_too(pair, tmp_path):
    child = pair.execute_func_rank_zero(start_a_child)
    os.kill(child, signal.SIGSTOP)
    batch = DataProto.from_dict({"x": torch.arange(4)})
    with pytest.raises(
        WorkerStopped, match=rf"pair rank 0 .*\nprocess {child} \(sleep 600\) was stopped"
    ):
        for _ in pair.double_and_tell(batch, wait_for=str(tmp_path / "never")).stream():
            pass
    assert_dead([child, *pair.worker_pids])


def start_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


@pytest.mark.proof
@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_is_stopped_for_a_moment_goes_on(pair):
    future = pair.sleep.remote(3)
    os.kill(pair.worker_pids[0], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pair.worker_pids[0], signal.SIGCONT)
    assert len(future.get(timeout=60)) == 2


@pytest.mark.proof
@pytest.mark.usefixtures("looks_often")
def test_a_stopped_rank_of_another_group_whose_result_is_waited_for_is_named(pair):
    pool = RayResourcePool([1], use_gpu=False)
    other = RayWorkerGroup(pool, RayClassWithInitArgs(ToyWorker), role="other")
    other.place()
    pair.place()
    batch = other.echo.remote(DataProto.from_dict({"values": torch.arange(4.0)}))
    batch.get()
    (pid,) = other.worker_pids
    os.kill(pid, signal.SIGSTOP)
    future = pair.scale_values.remote(
        other.echo.remote(DataProto.from_dict({"values": torch.arange(4.0)}))
    )
    with pytest.raises(
        WorkerStopped, match=rf"other rank 0 \(node [\d.]+, pid {pid}\) was stopped"
    ):
        future.get(timeout=100)
    assert_dead([pid])
    pool.release()


def limit_and_allocate(worker, allocate: Callable) -> None:
    """On rank 1 an allocation of 64 GiB fails, because the process may have 2 GiB more than it
    has."""
    if worker.rank == 1:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))
        allocate(64 << 30)


def torch_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def numpy_bytes(num_bytes: int) -> np.ndarray:
    return np.empty(num_bytes, np.uint8)


def test_an_error_that_rays_error_of_a_call_wraps_keeps_its_shortage():
    shortage = Shortage("host", "the processes")
    error = WorkerError("actor", 1, "a node", 7, "update_actor", "MemoryError", shortage)
    wrapped = RayTaskError("f", "a traceback", error, proctitle="", pid=1, ip="")
    raised: Any = wrapped.as_instanceof_cause()
    assert isinstance(raised, WorkerError)
    assert raised.shortage is shortage
    assert raised.reason() == " for want of host memory"


@pytest.mark.parametrize(
    ("allocate", "cause"), [(torch_bytes, "can't allocate memory"), (numpy_bytes, "MemoryError")]
)
def test_memory_of_the_host_that_does_not_suffice_is_told_with_the_processes_of_the_node(
    pair, allocate, cause
):
    pids = pair.worker_pids
    with pytest.raises(WorkerError) as caught:
        pair.execute_with_func_generator(limit_and_allocate, allocate)
    error, message = caught.value, str(caught.value)
    assert error.shortage is not None and error.shortage.memory == "host"
    where = f"pair rank 1 (node {pair.worker_nodes[1]}, pid {pids[1]})"
    assert message.startswith(
        f"{where} failed in execute_with_func_generator for want of host memory:"
    )
    assert cause in error.headline()
    assert "Resident memory of the largest processes" in message
    assert f"pid {pids[1]:<8} ray::pair rank 1 execute_with_func_generator" in message, message
    assert f"pid {pids[0]:<8} ray::" in message, message


def fail_on_the_device(worker) -> None:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("the engine failed") from error


def test_memory_of_a_device_that_does_not_suffice_is_told_where_an_engine_wraps_the_error(pair):
    with pytest.raises(
        WorkerError, match="for want of device memory: RuntimeError: the engine failed"
    ) as caught:
        pair.execute_with_func_generator(fail_on_the_device)
    assert caught.value.shortage.memory == "device"
    assert "Tried to allocate 3.00 GiB" in caught.value.cause


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A group of processes that may have 256 MiB more; skips where the kernel does not let us make
    one."""
    groups = dict(
        line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    folder = Path(f"/sys/fs/cgroup/memory{groups.get('memory', '')}/verl_like_test_{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    yield folder
    deadline = time.monotonic() + 30
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    folder.rmdir()


def join_and_fill(worker, folder: str) -> None:
    if worker.rank == 1:
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
        np.ones(1 << 30, np.uint8)
    time.sleep(100)


@pytest.mark.proof
def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_told_with_the_processes_of_the_node(
    pair, small_memory
):
    pids = pair.worker_pids
    with pytest.raises(
        WorkerDied, match=r"pair rank 1 .* died during \w+ for want of host memory"
    ) as caught:
        pair.execute_with_func_generator(join_and_fill, str(small_memory))
    message = str(caught.value)
    assert "The kernel's OOM killer has ended a process of the node meanwhile" in message
    assert f"pid {pids[0]:<8} ray::" in message, message
