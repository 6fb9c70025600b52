"""Every transport brings the trainer's weights to all processes of the rollout, and says so when it cannot."""

import copy
import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_like.single_controller.worker import Worker, reserve_port
from verl_like.workers.weight_sync import (
    StaleWeightsError,
    WeightExport,
    WeightSyncError,
    check_staged,
    collect_weights,
    iterate_weights,
)
from verl_like.workers.weight_transfer import GlooTransport, SharedMemoryTransport, WeightTransport, gloo
from verl_like.workers.weight_transfer.shared_memory import with_data

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["verl_like.workers.weight_transfer"])  # imports it once
SHAPES = {"embed": (100, 40), "layer.0": (70, 30), "norm": (40,), "layer.1": (50, 50), "head": (30, 40)}


def parameters(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def publish(transport: WeightTransport, version: int, rank: int = 0, world_size: int = 1) -> WeightExport:
    export = collect_weights(
        parameters(version),
        dtype=torch.float32,
        rank=rank,
        world_size=world_size,
        version=version,
        bucket_bytes=13_000,  # embed 16,000, layer.0 with norm 8,560, layer.1 with half a head 10,000, head 4,800
        allocate=transport.allocate,
    )
    return transport.publish(export)


def sent(export: WeightExport) -> WeightExport:
    """As another process gets it."""
    return copy.deepcopy(export)


def assert_arrived(exports: list[WeightExport], version: int) -> None:
    check_staged(exports, version, "cpu")
    for (name, got), (_, expected) in zip(iterate_weights(exports), parameters(version), strict=True):
        assert torch.equal(got, expected), name


def read(export: WeightExport, connection: Connection | None = None) -> int:
    """In another process: compares all weights; with a connection it then says so and keeps them."""
    assert_arrived([export], export.version)
    assert not np.asarray(export.buckets[0].data).flags.writeable
    if connection:
        connection.send(export.version)
        time.sleep(600)
    return os.getpid()


def test_other_processes_map_the_trainers_memory_by_an_address() -> None:
    export = publish(SharedMemoryTransport(), 1)
    assert len(pickle.dumps(export)) < 2000 and export.num_bytes == 4 * sum(map(np.prod, SHAPES.values()))
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        assert pool.submit(read, export).result(60) != os.getpid()
    first, second = sent(export), sent(export)
    with open(first.buckets[0].data.path, "r+b") as file:
        file.write(b"\x07")
    assert np.asarray(first.buckets[0].data)[0] == np.asarray(second.buckets[0].data)[0] == 7


def test_two_copies_serve_all_versions() -> None:
    transport = SharedMemoryTransport()
    paths = []
    for version in range(1, 6):
        export = publish(transport, version)
        paths.append([bucket.data.path for bucket in export.buckets])
        assert_arrived([sent(export)], version)
        assert_arrived([export], version)  # in the trainer's own process
        del export
    assert paths[0] == paths[2] == paths[4] and paths[1] == paths[3]
    assert not set(paths[0]) & set(paths[1])


def test_weights_that_somebody_reads_are_not_overwritten() -> None:
    transport = SharedMemoryTransport()
    reader = sent(publish(transport, 1))
    assert_arrived([reader], 1)
    for version in (2, 3, 4):
        publish(transport, version)
    assert_arrived([reader], 1)
    path = reader.buckets[0].data.path
    del reader
    assert path in [bucket.data.path for version in (5, 6) for bucket in publish(transport, version).buckets]


def test_weights_that_were_overwritten_or_are_being_so_are_refused() -> None:
    transport = SharedMemoryTransport()
    late = sent(publish(transport, 1))
    publish(transport, 2)
    transport.allocate(16_000, False)  # where the embedding of version 1 was, which stays as it is
    with pytest.raises(StaleWeightsError, match=r"Newer weights are being written into /proc/\d+/fd/\d+; load those"):
        check_staged([late], 1, "cpu")
    publish(transport, 3)
    with pytest.raises(StaleWeightsError, match="Weights of version 1 changed on their way: 4 of 5 parameters"):
        check_staged([sent(late)], 1, "cpu")


def test_a_killed_reader_leaves_the_weights_to_the_next_and_the_memory_to_the_trainer() -> None:
    transport = SharedMemoryTransport()
    export = publish(transport, 1)
    ours, theirs = PROCESSES.Pipe()
    reader = PROCESSES.Process(target=read, args=(export, theirs))
    reader.start()
    assert ours.poll(60) and ours.recv() == 1
    publish(transport, 2)
    assert export.buckets[0].data.path not in [bucket.data.path for bucket in publish(transport, 3).buckets]
    os.kill(reader.pid, signal.SIGKILL)
    reader.join(30)
    after = sent(export)
    assert_arrived([after], 1)
    del after
    assert export.buckets[0].data.path in [bucket.data.path for bucket in publish(transport, 4).buckets]


def test_memory_of_a_process_that_ended_or_of_another_node_is_refused_and_nothing_is_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        export = pool.submit(_publish_elsewhere).result(60)
    with pytest.raises(WeightSyncError, match=r"which ended or is not on this node; .*weight_transport=gloo or obj"):
        check_staged([export], 1, "cpu")
    assert set(os.listdir("/dev/shm")) <= before
    mine = publish(SharedMemoryTransport(), 1)
    pages = dataclasses.replace(mine.buckets[0].data, name="/memfd:another (deleted)")  # the number was given again
    wrong = dataclasses.replace(mine, buckets=(dataclasses.replace(mine.buckets[0], data=pages), *mine.buckets[1:]))
    with pytest.raises(WeightSyncError, match="ended or is not on this node"):
        check_staged([wrong], 1, "cpu")


def _publish_elsewhere() -> WeightExport:
    return publish(SharedMemoryTransport(), 1)


def _place(port: int, rank: int, world_size: int, local_rank: int = 0) -> Worker:
    places = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"})
    return Worker()


def train(connection: Connection, rank: int) -> None:
    """A rank of a trainer of two: publishes the versions that it is told to."""
    gloo._BUCKET_TIMEOUT = timedelta(seconds=5)
    _place(0, rank, 2)
    transport = GlooTransport()
    while version := connection.recv():
        connection.send(publish(transport, version, rank, 2))


def roll_out(connection: Connection, port: int, rank: int, local_rank: int) -> None:
    """A rank of a rollout of three on two nodes: receives what it is sent, and answers what came of it."""
    worker, transport = _place(port, rank, 3, local_rank), GlooTransport()
    while exports := connection.recv():
        try:
            received = transport.receive(exports, worker)
            assert_arrived(received, exports[0].version)
            connection.send([bucket.data.path for export in received for bucket in export.buckets])
        except WeightSyncError as error:
            connection.send(str(error))


class Group:
    """Processes that answer."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        pipes = [PROCESSES.Pipe() for _ in range(len(arguments[0]))]
        self.connections = [ours for ours, _ in pipes]
        places = zip(pipes, *arguments, strict=True)
        self.processes = [PROCESSES.Process(target=function, args=(theirs, *rest)) for (_, theirs), *rest in places]
        for process in self.processes:
            process.start()

    def ask(self, what: Any) -> list[Any]:
        for connection in self.connections:
            connection.send(what)
        assert all(connection.poll(60) for connection in self.connections)
        return [connection.recv() for connection in self.connections]

    def end(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.send(None)
            process.join(30)


def check_on_rank(connection: Connection, port: int, rank: int) -> None:
    """A rank of two that load together: checks the export at its rank, and answers what came of it."""
    _place(port, rank, 2)
    dist.init_process_group("gloo")
    while exports := connection.recv():
        try:
            check_staged([exports[rank]], 1, "cpu")
            connection.send("")
        except StaleWeightsError as error:
            connection.send(str(error))


def test_ranks_that_load_together_refuse_weights_that_are_stale_on_one_of_them() -> None:
    transports = SharedMemoryTransport(), SharedMemoryTransport()
    good, late = (publish(transport, 1) for transport in transports)
    publish(transports[1], 2)
    transports[1].allocate(16_000, False)  # where the embedding of version 1 was
    holder, port = reserve_port()
    with holder:
        ranks = Group(check_on_rank, [port] * 2, [0, 1])
        for _ in range(2):
            assert ranks.ask([good, good]) == ["", ""]
            other, own = ranks.ask([good, late])
            assert other == "Weights of version 1 are stale on another rank."
            assert own.startswith("Newer weights are being written into /proc/")
    ranks.end()


def test_gloo_brings_every_bucket_once_to_each_node_of_every_rollout_group() -> None:
    holder, port = reserve_port()
    trainer = Group(train, [0, 1])
    groups = [Group(roll_out, [port + i] * 3, [0, 1, 2], [0, 1, 0]) for i in range(2)]  # rank 2 is on another node
    with holder:
        for version in (1, 2, 3):
            exports = trainer.ask(version)
            for group in groups:
                node, same_node, other_node = group.ask(exports)
                assert len(node) == exports[0].num_buckets and same_node in (node, other_node) and node != other_node
        latest = trainer.ask(4)
        store = dist.TCPStore(*latest[0].address, is_master=False)
        request = json.dumps(["of a receiver that has died", "its group", 4, 1, 1])
        store.set(f"request/{store.add('requests', 1)}", request)
        groups[0].connections[2].send(None)  # it ends; the next in its place cannot use what the others have kept
        next_one = Group(roll_out, [port], [2], [0])
        groups[0].connections[2:], groups[0].processes[2:] = next_one.connections, next_one.processes
        assert all(type(paths) is list for paths in groups[0].ask(latest))
        message = "Version 3 of the weights was asked for, but the trainer has 4 by now."
        assert groups[1].ask(exports) == [message] * 3
    for group in (*groups, trainer):
        group.end()


def test_weights_that_gloo_has_promised_stay_as_they_are_while_newer_ones_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    transport = GlooTransport()
    export = publish(transport, 1)
    store = dist.TCPStore(*export.address, is_master=False)
    store.set("request/1", json.dumps(["an update", "a group", 1, 1, 1]))
    assert json.loads(store.get("an update/answer")) == ["", 1, True]
    for version in (2, 3):  # while the trainer waits for the receiver; the third goes where the first was
        publish(transport, version)
    arrays = [np.empty(bucket.data.nbytes, np.uint8) for bucket in export.buckets]
    gloo._broadcast(gloo._join(store, "an update", 1, 1), arrays)
    assert_arrived([with_data(export, arrays)], 1)
