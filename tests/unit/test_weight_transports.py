"""Every transport brings the trainer's weights to all processes of the rollout, and says so when it
cannot."""

import copy
import dataclasses
import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import FORKS

from verl_like.single_controller.worker import Worker, reserve_port
from verl_like.workers.weights import gloo, shared_memory
from verl_like.workers.weights.arrival import StaleWeightsError, WeightSyncError, check_staged
from verl_like.workers.weights.exports import WeightExport, collect_weights, iterate_weights
from verl_like.workers.weights.gloo import GlooTransport
from verl_like.workers.weights.shared_memory import SharedMemoryTransport, with_data
from verl_like.workers.weights.transport import WeightTransport

SHAPES = {
    "embed": (100, 40),
    "layer.0": (70, 30),
    "norm": (40,),
    "layer.1": (50, 50),
    "head": (30, 40),
}


def parameters(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def publish(
    transport: WeightTransport, version: int, rank: int = 0, world_size: int = 1
) -> WeightExport:
    export = collect_weights(
        parameters(version),
        dtype=torch.float32,
        rank=rank,
        world_size=world_size,
        version=version,
        # Embed 16,000, layer.0 with norm 8,560, layer.1 with half a head 10,000, head 4,800
        bucket_bytes=13_000,
        allocate=transport.allocate,
    )
    return transport.publish(export)


def sent(export: Any) -> Any:
    """As another process gets it."""
    return copy.deepcopy(export)


def assert_arrived(exports: list[WeightExport], version: int) -> None:
    check_staged(exports, version, "cpu")
    for (name, got), (_, expected) in zip(
        iterate_weights(exports), parameters(version), strict=True
    ):
        assert torch.equal(got, expected), name


def read(export: WeightExport, connection: Connection | None = None) -> int:
    """In another process: compares all weights; with a connection it then says so and keeps
    them."""
    assert_arrived([export], export.version)
    assert not np.asarray(export.buckets[0].data).flags.writeable
    if connection:
        connection.send(export.version)
        time.sleep(600)
    return os.getpid()


def test_other_processes_map_the_trainers_memory_by_an_address() -> None:
    transport = SharedMemoryTransport()
    export = publish(transport, 1)
    assert len(pickle.dumps(export)) < 2000 and export.num_bytes == 4 * sum(
        map(np.prod, SHAPES.values())
    )
    with ProcessPoolExecutor(1, mp_context=FORKS) as pool:
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
    assert path in [
        bucket.data.path for version in (5, 6) for bucket in publish(transport, version).buckets
    ]


def test_weights_that_were_overwritten_or_are_being_so_are_refused() -> None:
    transport = SharedMemoryTransport()
    late = sent(publish(transport, 1))
    publish(transport, 2)
    transport.allocate(16_000, False)  # where the embedding of version 1 was, which stays as it is
    with pytest.raises(
        StaleWeightsError,
        match=r"Newer weights are being written into /proc/\d+/fd/\d+; load those",
    ):
        check_staged([late], 1, "cpu")
    publish(transport, 3)
    with pytest.raises(
        StaleWeightsError, match="Weights of version 1 changed on their way: 4 of 5 tensors"
    ):
        check_staged([sent(late)], 1, "cpu")


def test_memory_whose_owner_ends_at_any_moment_is_gone_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = SharedMemoryTransport()
    pages = sent(publish(transport, 1)).buckets[0].data
    gone = dataclasses.replace(pages, path="/proc/1073741823/fd/3")
    another = dataclasses.replace(pages, path="/proc/self/fd/2")
    monkeypatch.setattr(os.path, "islink", lambda path: True)  # as it was a moment before
    for each in (gone, another):
        assert not each._is_there()
        with pytest.raises(
            WeightSyncError,
            match=r"memory of another process, /proc/.*, which ended or is not on this",
        ):
            np.asarray(each)
    monkeypatch.setattr(shared_memory, "_mapped", {gone: None})
    assert np.asarray(pages).nbytes == pages.nbytes
    assert list(shared_memory._mapped) == [pages]


def test_memory_that_is_held_outlives_its_owner_and_stays_as_it_is() -> None:
    transport = SharedMemoryTransport()
    export = publish(transport, 1)
    held = with_data(export, [bucket.data.held() for bucket in export.buckets])
    for version in (2, 3, 4):
        publish(transport, version)
    late = sent(export)
    with pytest.raises(WeightSyncError, match="ended or is not on this node"):
        del transport
        late.buckets[0].data.held()
    assert_arrived([sent(held)], 1)
    del held
    with pytest.raises(WeightSyncError, match="ended or is not on this node"):
        assert_arrived([late], 1)


def test_a_killed_reader_leaves_the_weights_to_the_next_and_the_memory_to_the_trainer() -> None:
    transport = SharedMemoryTransport()
    export = publish(transport, 1)
    ours, theirs = FORKS.Pipe()
    reader = FORKS.Process(target=read, args=(export, theirs))
    reader.start()
    assert ours.poll(60) and ours.recv() == 1
    publish(transport, 2)
    assert export.buckets[0].data.path not in [
        bucket.data.path for bucket in publish(transport, 3).buckets
    ]
    os.kill(reader.pid, signal.SIGKILL)
    reader.join(30)
    after = sent(export)
    assert_arrived([after], 1)
    del after
    assert export.buckets[0].data.path in [
        bucket.data.path for bucket in publish(transport, 4).buckets
    ]


def test_memory_of_a_process_that_ended_or_of_another_node_is_refused_and_nothing_is_left_behind() -> (
    None
):
    before = names_in_shared_memory()
    with ProcessPoolExecutor(1, mp_context=FORKS) as pool:
        export = pool.submit(_publish_elsewhere).result(60)
    with pytest.raises(
        WeightSyncError, match=r"which ended or is not on this node; .*weight_transport=gloo or obj"
    ):
        check_staged([export], 1, "cpu")
    # Other tests of this machine have names there for a moment; what is left behind stays.
    deadline = time.monotonic() + 10
    while (now := names_in_shared_memory()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now <= before
    transport = SharedMemoryTransport()
    mine = publish(transport, 1)
    # The number was given again
    pages = dataclasses.replace(mine.buckets[0].data, name="/memfd:another (deleted)")
    wrong = dataclasses.replace(
        mine, buckets=(dataclasses.replace(mine.buckets[0], data=pages), *mine.buckets[1:])
    )
    with pytest.raises(WeightSyncError, match="ended or is not on this node"):
        check_staged([wrong], 1, "cpu")


def names_in_shared_memory() -> set[str]:
    """The names of shared memory on this machine, without those of semaphores."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _publish_elsewhere() -> WeightExport:
    return publish(SharedMemoryTransport(), 1)


def _place(port: int, rank: int, world_size: int, local_rank: int = 0) -> Worker:
    places = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "MASTER_PORT": port}
    os.environ.update(
        {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    )
    return Worker()


def train(connection: Connection, rank: int) -> None:
    """A rank of a trainer of two: publishes the versions that it is told to."""
    gloo._BUCKET_TIMEOUT = timedelta(seconds=5)
    _place(0, rank, 2)
    transport = GlooTransport()
    while version := connection.recv():
        connection.send(publish(transport, version, rank, 2))


# The third rank seems to be elsewhere
NODES = [gloo._BOOT_ID, gloo._BOOT_ID, Path("/proc/sys/kernel/ostype")]


def roll_out(connection: Connection, port: int, rank: int) -> None:
    """A rank of a worker group of three on two nodes: receives what it is sent, and answers what
    came of it."""
    gloo._BUCKET_TIMEOUT, gloo._BOOT_ID = timedelta(seconds=5), NODES[rank]
    worker, transport = _place(port, rank, 3, local_rank=rank % 2), GlooTransport()
    while exports := connection.recv():
        try:
            received = transport.receive(exports, worker)
            assert_arrived(received, exports[0].version)
            connection.send((received, len(transport._segments)))
            del received
        except WeightSyncError as error:
            connection.send(str(error))


class Group:
    """Processes that answer."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        pipes = [FORKS.Pipe() for _ in range(len(arguments[0]))]
        self.function, self.places = function, list(zip(*arguments, strict=True))
        self.connections = [ours for ours, _ in pipes]
        places = zip(pipes, self.places, strict=True)
        self.processes = [
            FORKS.Process(target=function, args=(theirs, *place)) for (_, theirs), place in places
        ]
        for process in self.processes:
            process.start()

    def tell(self, what: Any) -> None:
        for connection in self.connections:
            connection.send(what)

    def answers(self) -> list[Any]:
        assert all(connection.poll(60) for connection in self.connections)
        return [connection.recv() for connection in self.connections]

    def ask(self, what: Any) -> list[Any]:
        self.tell(what)
        return self.answers()

    def replace(self, index: int) -> None:
        """Kills a process, and starts one in its place."""
        self.processes[index].kill()
        self.processes[index].join(30)
        self.connections[index], theirs = FORKS.Pipe()
        self.processes[index] = FORKS.Process(
            target=self.function, args=(theirs, *self.places[index])
        )
        self.processes[index].start()

    def end(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.send(None)
            process.join(30)


def check_on_rank(connection: Connection, port: int, rank: int) -> None:
    """A rank of two that load together: checks the export at its rank, and answers what came of
    it."""
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


def memory(answers: list[Any]) -> list[list[str]]:
    """Of each rank, the names of the memory where its weights are."""
    return [
        [bucket.data.name for export in received for bucket in export.buckets]
        for received, _ in answers
    ]


@pytest.fixture
def trainer() -> Iterator[Group]:
    group = Group(train, [0, 1])
    yield group
    group.end()


@pytest.fixture
def rollouts() -> Iterator[list[Group]]:
    holder, port = reserve_port()
    groups = [Group(roll_out, [port + i] * 3, [0, 1, 2]) for i in range(2)]
    with holder:
        yield groups
    for group in groups:
        group.end()


def test_gloo_brings_every_bucket_once_to_each_node(trainer: Group, rollouts: list[Group]) -> None:
    num_segments = []
    for version in range(1, 7):
        exports = trainer.ask(version)
        # Two after two: the first that asks receives, and its memory is that of the other, which
        # has received before.
        first, second = (group.ask(exports) for group in rollouts[:: (-1) ** (version // 2)])
        node, same_node, other_node = memory(first)
        assert len({*node}) == len({*other_node}) == exports[0].num_buckets and not {*node} & {
            *other_node
        }
        assert node == same_node and memory(second) == memory(first)
        num_segments.append(
            [sum(count for _, count in (first[rank], second[rank])) for rank in range(3)]
        )
    num_buckets = exports[0].num_buckets
    assert num_segments[0] == [num_buckets, 0, num_buckets]
    # The latest weights and those before
    assert num_segments[1:] == [[2 * num_buckets, 0, 2 * num_buckets]] * 5


def test_gloo_keeps_as_many_keys_in_its_stores_after_many_updates_as_after_few(
    trainer: Group, rollouts: list[Group]
) -> None:
    numbers = []
    for version in range(1, 8):
        exports = trainer.ask(version)
        for group in rollouts:
            assert len(group.ask(exports)) == 3
        stores = [dist.TCPStore(*export.address, is_master=False) for export in exports]
        numbers.append([store.num_keys() for store in stores])
    stale = trainer.ask(8)
    trainer.ask(9)
    assert all("but the trainer has 9 by now" in answer for answer in rollouts[0].ask(stale))
    numbers.append([store.num_keys() for store in stores])
    exports = trainer.ask(10)
    assert memory(rollouts[0].ask(exports)) == memory(rollouts[1].ask(exports))
    numbers.append([store.num_keys() for store in stores])
    # Of each group its counter, six words, its two nodes, and three places where those who join
    # meet; where the weights are on the two nodes; the number of requests.
    assert max(max(each) for each in numbers) <= 2 * (1 + 6 + 2 + 3) + 2 + 1


def test_worker_groups_that_ask_gloo_at_the_same_time_share_what_one_of_them_receives(
    trainer: Group, rollouts: list[Group]
) -> None:
    for version in (1, 2, 3):
        exports = trainer.ask(version)
        for group in rollouts:
            group.tell(exports)
        first, second = (memory(group.answers()) for group in rollouts)
        assert first == second and first[0] == first[1] != first[2]


def test_a_worker_group_receives_by_gloo_itself_what_a_killed_process_has_staged(
    trainer: Group, rollouts: list[Group]
) -> None:
    first, second = rollouts
    exports = trainer.ask(1)
    theirs, own = (group.ask(exports)[0][0] for group in rollouts)
    late = sent(theirs)
    first.replace(0)
    assert_arrived(own, 1)  # whose memory the killed process wrote
    with pytest.raises(WeightSyncError, match="ended or is not on this node"):
        late[0].buckets[0].data.held()
    exports = trainer.ask(2)
    # The second has joined the trainer
    assert memory(second.ask(exports)) == memory(first.ask(exports))
    exports = trainer.ask(3)
    before = memory(first.ask(exports))
    first.replace(0)
    after = memory(second.ask(exports))  # and joins it without its other node
    assert after[0] == after[1] != before[0] and after[2] == before[2]
    assert memory(first.ask(exports)) == after
    exports = trainer.ask(4)
    assert memory(first.ask(exports)) == memory(second.ask(exports))


def test_gloo_serves_the_next_after_receivers_that_died_and_refuses_weights_that_are_not_the_latest(
    trainer: Group, rollouts: list[Group]
) -> None:
    old = trainer.ask(3)
    assert len(rollouts[0].ask(old)) == 3
    latest = trainer.ask(4)
    store = dist.TCPStore(*latest[0].address, is_master=False)
    store.set(
        f"request/{store.add('requests', 1)}",
        json.dumps(["of receivers that have died", "their group", 4]),
    )
    rollouts[0].replace(2)  # the next in its place cannot use what the others have kept
    assert memory(rollouts[0].ask(latest)) == memory(rollouts[1].ask(latest))
    message = "Version 3 of the weights was asked for, but the trainer has 4 by now."
    assert rollouts[1].ask(old) == [message] * 3
    assert len(rollouts[1].ask(latest)) == 3


def test_weights_that_gloo_has_promised_stay_as_they_are_while_newer_ones_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    transport = GlooTransport()
    export = publish(transport, 1)
    store = dist.TCPStore(*export.address, is_master=False)
    store.set("request/1", json.dumps(["an update", "a group", 1]))
    assert store.get("an update/turn") == b""
    # While the trainer waits for the receiver; the third goes where the first was
    for version in (2, 3):
        publish(transport, version)
    arrays = [np.empty(bucket.data.nbytes, np.uint8) for bucket in export.buckets]
    rank = store.add("an update/receivers", 1)
    store.set("an update/members", "")
    gloo._broadcast(gloo._join(store, "an update", rank, None), arrays)
    assert_arrived([with_data(export, arrays)], 1)
