"""A worker that Ray's memory monitor kills."""

from pathlib import Path

import pytest
import ray
from toy_workers import ToyWorker

from verl_like.single_controller import WorkerDied
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = pytest.mark.ray


@pytest.mark.proof
def test_a_worker_that_rays_memory_monitor_kills_is_told_with_the_processes_of_the_node():
    path = ":".join(map(str, Path(__file__).parents[:2]))  # for toy_workers
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        # Too much from the start; the monitor looks after five seconds.
        _system_config={"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 5_000},
    )
    group = RayWorkerGroup(
        RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(ToyWorker), role="critic"
    )
    with pytest.raises(
        WorkerDied, match=r"critic rank 0 \(.*\) died during \w+ for want of host memory"
    ) as caught:
        group.sleep.remote(100).get(timeout=60)
    message = str(caught.value)
    assert caught.value.shortage.memory == "host"
    assert (
        "Ray's memory monitor killed it. Memory usage" in message
        and "exceeded threshold" in message
    )
    assert "PID\tMEM(GB)\tCOMMAND" in message and "ray::" in message, message
    ray.shutdown()
