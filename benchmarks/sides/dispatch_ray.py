"""What the sides of `dispatch`, `calls` and `scaling` ask of their Ray, and raw Ray actors as the
limit."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray._private.internal_api import node_stats


def init(num_cpus: int, store_mib: int) -> None:
    """A Ray of the side's own; its workers see the same environment."""
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=store_mib * 2**20,
        _system_config={"automatic_object_spilling_enabled": False},
    )


def created_bytes() -> int:
    """Bytes of all objects that were ever put into the object store."""
    (node,) = ray.nodes()
    reply = node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    )
    return reply.store_stats.cumulative_created_bytes


def private_bytes() -> int:
    """Memory that this process holds and the object store does not."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def milliseconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Of each call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return times


@ray.remote(num_cpus=1)
class RawActor:
    """Does what a worker group's `ping` and `echo` do, with nothing but Ray."""

    def ping(self) -> None:
        return None

    def echo(self, payload: np.ndarray) -> np.ndarray:
        return payload


def raw_actors(count: int) -> list[Any]:
    actors = [RawActor.remote() for _ in range(count)]
    ray.get([actor.ping.remote() for actor in actors])
    return actors


def raw_ping(actors: list[Any]) -> None:
    ray.get([actor.ping.remote() for actor in actors])


def raw_echo(actors: list[Any], payload: np.ndarray) -> np.ndarray:
    """Every actor is given the payload and returns it, as a worker group's ranks do together."""
    return ray.get([actor.echo.remote(payload) for actor in actors])[0]
