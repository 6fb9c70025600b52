"""A run starts its own Ray or joins the one that is named, whatever else runs on the machine."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from verl_like.single_controller import Dispatch, Worker, register
from verl_like.single_controller.failure import PlacementError
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    setup_worker,
)
from verl_like.single_controller.ray.start import end_ray, require_cluster, start_ray
from verl_like.trainer.config.run_config import RayInitConfig, RayKwargsConfig, RunConfig

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def alone(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # For this file's worker
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def running(ray_folder: Path) -> Iterator[str]:
    """The address of a cluster of 3 CPUs that somebody started with `ray start`."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={port}",
    ]
    command += ["--num-cpus=3", "--include-dashboard=false", "--disable-usage-stats"]
    # Else who gives an address, and not auto, has to set RAY_AUTH_MODE=token as well.
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
    )
    note = ray_folder / "ray/ray_current_cluster"
    deadline = time.monotonic() + 60
    try:
        while not note.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        for member in [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]:
            member.kill()
        process.wait(timeout=30)


def start(configured: str | None) -> float:
    """Starts as a run with this `ray_init.address` does; the CPUs of the Ray it has then."""
    ray_kwargs = RayKwargsConfig(ray_init=RayInitConfig(address=configured))
    address = RunConfig.model_construct(ray_kwargs=ray_kwargs).cluster_address
    if address:
        require_cluster(address)
    start_ray(address, None if address else 2)
    return ray.cluster_resources()["CPU"]


def test_beside_a_running_cluster_a_run_starts_its_own(running):
    assert start(None) == 2


def test_a_run_starts_no_monitor_and_no_dashboard_and_leaves_ray_init_as_it_is():
    starts_dashboard = ray._private.services.start_api_server
    parameters = ray._private.parameter.RayParams
    start(None)
    session = ray._private.worker._global_node.get_session_dir_path()
    scripts = set()
    for child in psutil.Process().children(recursive=True):
        words = child.cmdline()
        if any(session in word for word in words):  # not of the cluster that runs beside it
            scripts |= {Path(word).name for word in words}
            if Path(words[0]).name == "raylet":
                raylet = " ".join(words)
    assert {"gcs_server", "raylet"} <= scripts
    assert f"--python_worker_command={sys.executable} {setup_worker.__file__} " in raylet
    assert not {"monitor.py", "log_monitor.py", "dashboard.py"} & scripts
    assert ray._private.services.start_api_server is starts_dashboard
    assert ray._private.parameter.RayParams is parameters


def test_a_run_joins_the_cluster_that_is_configured(running):
    assert start(running) == 3


@pytest.mark.parametrize("value", ["the cluster", "auto"])
def test_a_run_joins_the_cluster_of_the_environment(running, value, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", running if value == "the cluster" else value)
    assert start(None) == 3


def test_the_note_of_a_cluster_that_is_gone_is_not_followed(ray_folder):
    (ray_folder / "ray").mkdir(exist_ok=True)
    (ray_folder / "ray/ray_current_cluster").write_text("127.0.0.1:1")
    assert start(None) == 2
    with pytest.raises(
        PlacementError, match=r"no Ray cluster can be joined at auto .*Connection refused"
    ):
        require_cluster("auto")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379", "nonsense"])
def test_an_address_where_nothing_is_is_refused(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        PlacementError, match=f"no Ray cluster can be joined at {address} .*RAY_ADDRESS"
    ):
        start(None)


@pytest.mark.proof
def test_an_address_that_does_not_answer_is_refused_within_ten_seconds():
    with socket.socket() as silent:
        silent.bind(("", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            PlacementError, match=f"no Ray cluster can be joined at {address} .no answer within 8 s"
        ):
            require_cluster(address)


class Titled(Worker):
    """Says what `ps` shows of its process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> tuple[str, int]:
        process = psutil.Process()
        return process.cmdline()[0], process.nice()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leaves_a_file(self) -> str:
        descriptor, path = tempfile.mkstemp(dir=os.environ["TMPDIR"])
        os.close(descriptor)
        assert Path(path).parent == Path(tempfile.gettempdir())
        return path


@pytest.mark.proof
def test_processes_show_role_rank_and_method_and_have_the_drivers_priority():
    start(None)
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Titled), role="critic")
    assert group.seen() == [(f"ray::critic rank {rank} seen", os.nice(0)) for rank in range(2)]
    idle = [psutil.Process(pid).cmdline()[0] for pid in group.worker_pids]
    assert idle == ["ray::critic rank 0", "ray::critic rank 1"]


@pytest.mark.proof
def test_what_workers_leave_in_the_folder_of_temporary_files_goes_with_the_session_unless_the_logs_are_kept(
    ray_folder,
):
    sessions = []
    for keep_logs in (True, False):
        start(None)
        group = RayWorkerGroup(
            RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Titled), role="critic"
        )
        (left,) = group.leaves_a_file()
        assert Path(left).is_relative_to(ray_folder / "ray")
        end_ray(keep_logs)
        assert Path(left).exists() == keep_logs
        sessions.append(Path(left).parent.parent)
    # The second start removed what the first had kept.
    assert [session.parent for session in sessions] == [ray_folder / "ray"] * 2
    assert not any(session.exists() for session in sessions)
