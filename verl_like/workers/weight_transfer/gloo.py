"""Weights broadcast over the network with gloo: once to every node, whose processes then share the memory."""

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl_like.single_controller.worker import Worker
from verl_like.workers.weight_sync import StaleWeightsError, WeightExport
from verl_like.workers.weight_transfer.shared_memory import SharedMemoryTransport, SharedPages, with_data

_TIMEOUT = timedelta(minutes=10)
"""For all of an update, behind those of other rollout groups."""
_BUCKET_TIMEOUT = timedelta(minutes=1)
"""For a bucket, and for all to join once the trainer is ready."""
_IDLE = timedelta(days=20)
"""For the next request of weights; a wait at a store cannot be longer than 2**31 ms."""
_log = logging.getLogger(__name__)


class GlooTransport(SharedMemoryTransport):
    """Every rank of the trainer broadcasts its buckets to one process of each node of the rollout.

    The trainer goes on meanwhile: a thread of its process sends the latest weights to one rollout group after the
    other. A process that receives writes into memory that the other ranks of its node map. Connections and process
    groups last from update to update, until one fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sender: _Sender | None = None
        self._links: dict[tuple[str, int], _Link] = {}

    def publish(self, export: WeightExport) -> WeightExport:
        self._sender = self._sender or _Sender()
        self._sender.latest = replace(super().publish(export), address=self._sender.address)
        return self._sender.latest

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        received: list[WeightExport] = []
        links, self._links = self._links, {}
        for export in exports:  # one after the other: two rollout groups never wait for each other's trainer
            assert export.address is not None, "published by a transport without a store"
            link = links.get(export.address) or _Link(dist.TCPStore(*export.address, is_master=False, timeout=_TIMEOUT))
            key = link.meet(export.version, worker)
            if worker.local_rank == 0:
                arrays = [self.allocate(bucket.data.nbytes, False) for bucket in export.buckets]
                _broadcast(link.group, arrays)
                received.append(with_data(export, arrays))
            self._links[export.address] = link
        place = f"{key}/{Path('/proc/sys/kernel/random/boot_id').read_text()}"
        if worker.local_rank == 0:
            received = self._hand_out(received)
            addresses = [[astuple(bucket.data) for bucket in export.buckets] for export in received]
            link.store.set(place, json.dumps(addresses))
            return received
        addresses = json.loads(link.store.get(place))
        pages = [[SharedPages(*address) for address in each] for each in addresses]
        return [with_data(*each) for each in zip(exports, pages, strict=True)]


@dataclass
class _Link:
    """What a rank of the rollout keeps of its way to a rank of the trainer, at whose store all ranks of it meet."""

    store: dist.Store
    group: Any = None
    """Of the rank of the trainer and those that receive from it; None before, and on the others."""

    def meet(self, version: int, worker: Worker) -> str:
        """The update's name, once all have come. Raises StaleWeightsError if the trainer has other weights by now."""
        rollout = "{}:{}".format(*worker.get_master_addr_port())
        # A failed update may be repeated: every rank comes once for each try.
        counter = f"{version}/{rollout}"
        key = f"{counter}/{(self.store.add(counter, 1) - 1) // worker.world_size}"
        receives = worker.local_rank == 0
        rank = self.store.add(f"{key}/receivers", int(receives))
        self.store.add(f"{key}/new", int(receives and self.group is None))
        if self.store.add(f"{key}/arrived", 1) == worker.world_size:
            counts = [self.store.add(f"{key}/{name}", 0) for name in ("receivers", "new")]
            self.store.set(f"request/{self.store.add('requests', 1)}", json.dumps([key, rollout, version, *counts]))
        refusal, num_receivers, joins = json.loads(self.store.get(f"{key}/answer"))
        if refusal:
            raise StaleWeightsError(refusal)
        if receives and joins:
            self.group = _join(self.store, key, rank, num_receivers)
        return key


class _Sender:
    """A rank of the trainer: a store where receivers ask for weights, and a thread that broadcasts the latest."""

    def __init__(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: asks for the way to others
            probe.connect((os.environ["MASTER_ADDR"], 1))
            host = probe.getsockname()[0]
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self.address = host, self.store.port
        self.latest: WeightExport
        self.groups: dict[str, Any] = {}
        """By the rollout group that is in it."""
        threading.Thread(target=self._serve, name="broadcast of weights", daemon=True).start()

    def _serve(self) -> None:
        for number in itertools.count(1):
            self.store.wait([f"request/{number}"], _IDLE)
            key, rollout, version, *counts = json.loads(self.store.get(f"request/{number}"))
            try:
                self._send(key, rollout, version, *counts)
            except RuntimeError as error:  # a receiver has died, which its own side reports; the next may come
                _log.warning("Weights of version %d did not reach all of %s: %s", version, key, error)

    def _send(self, key: str, rollout: str, version: int, num_receivers: int, num_new: int) -> None:
        export, arrays = self.latest, []
        with contextlib.suppress(StaleWeightsError):  # it is not the latest any more
            arrays = [np.asarray(bucket.data) for bucket in export.buckets]  # which stays as it is from here on
        refusal = f"Version {version} of the weights was asked for, but the trainer has {self.latest.version} by now."
        is_latest = version == export.version and export is self.latest
        group = None if num_new else self.groups.get(rollout)
        self.store.set(f"{key}/answer", json.dumps(["" if is_latest else refusal, num_receivers, group is None]))
        if is_latest:
            self.groups.pop(rollout, None)  # until all has gone well
            group = group or _join(self.store, key, 0, num_receivers)
            _broadcast(group, arrays)
            self.groups[rollout] = group


def _join(store: dist.Store, key: str, rank: int, num_receivers: int) -> Any:
    # By hand, since the default group of the process belongs to the engine.
    return dist.ProcessGroupGloo(dist.PrefixStore(key, store), rank, 1 + num_receivers, _BUCKET_TIMEOUT)


def _broadcast(group: Any, arrays: Sequence[np.ndarray]) -> None:
    """From rank 0 to all others, with two buckets on their way at a time."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    pending: deque[dist.Work] = deque()
    for array in arrays:
        pending.append(group.broadcast([torch.from_dlpack(array)], options))
        if len(pending) == 2:
            pending.popleft().wait(_BUCKET_TIMEOUT)
    for work in pending:
        work.wait(_BUCKET_TIMEOUT)
