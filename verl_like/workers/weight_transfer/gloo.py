"""Weights broadcast over the network with gloo: once to every node, whose processes then share the memory."""

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl_like.single_controller.worker import Worker
from verl_like.workers.weight_sync import WeightExport, WeightSyncError
from verl_like.workers.weight_transfer.shared_memory import SharedMemoryTransport, SharedPages, with_data

_TIMEOUT = timedelta(minutes=10)
"""For all of an update, behind those of other rollout groups."""
_BUCKET_TIMEOUT = timedelta(minutes=1)
"""For a bucket, and for all to join once the trainer is ready."""
_POLL_S = 0.005
_log = logging.getLogger(__name__)


class GlooTransport(SharedMemoryTransport):
    """Every rank of the trainer broadcasts its buckets to one process of each node of the rollout.

    The trainer goes on meanwhile: a thread of its process sends the latest weights to one rollout group after the
    other. A process that receives writes into memory that the other ranks of its node map.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sender: _Sender | None = None

    def publish(self, export: WeightExport) -> WeightExport:
        self._sender = self._sender or _Sender()
        self._sender.latest = replace(super().publish(export), address=self._sender.address)
        return self._sender.latest

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        received: list[WeightExport] = []
        for export in exports:  # one after the other: two rollout groups never wait for each other's trainer
            meeting = _Meeting(export, worker)
            if worker.local_rank == 0:
                arrays = [self.allocate(bucket.data.nbytes, False) for bucket in export.buckets]
                _broadcast(_join(meeting.store, meeting.key, meeting.rank, meeting.num_receivers), arrays)
                received.append(with_data(export, arrays))
        place = f"{meeting.key}/{Path('/proc/sys/kernel/random/boot_id').read_text()}"
        if worker.local_rank == 0:
            received = self._hand_out(received)
            addresses = [[astuple(bucket.data) for bucket in export.buckets] for export in received]
            meeting.store.set(place, json.dumps(addresses))
            return received
        addresses = json.loads(meeting.store.get(place))
        pages = [[SharedPages(*address) for address in each] for each in addresses]
        return [with_data(*each) for each in zip(exports, pages, strict=True)]


class _Meeting:
    """A rank of the rollout where all ranks of it meet with one of the trainer, at the store of the latter.

    Raises:
        WeightSyncError: the trainer has other weights by now.
    """

    def __init__(self, export: WeightExport, worker: Worker) -> None:
        assert export.address is not None, "published by a transport without a store"
        self.store = dist.TCPStore(*export.address, is_master=False, timeout=_TIMEOUT)
        group = f"{export.version}/{worker.get_master_addr_port()}"
        # A failed update may be repeated: every rank comes once for each try.
        self.key = f"{group}/{(self.store.add(group, 1) - 1) // worker.world_size}"
        self.rank = self.store.add(f"{self.key}/receivers", int(worker.local_rank == 0))
        if self.store.add(f"{self.key}/arrived", 1) == worker.world_size:
            request = [self.key, export.version, self.store.add(f"{self.key}/receivers", 0)]
            self.store.set(f"request/{self.store.add('requests', 1)}", json.dumps(request))
        refusal, self.num_receivers = json.loads(self.store.get(f"{self.key}/answer"))
        if refusal:
            raise WeightSyncError(refusal)


class _Sender:
    """A rank of the trainer: a store where receivers ask for weights, and a thread that broadcasts the latest."""

    def __init__(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: asks for the way to others
            probe.connect((os.environ["MASTER_ADDR"], 1))
            host = probe.getsockname()[0]
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self.address = host, self.store.port
        self.latest: WeightExport | None = None
        threading.Thread(target=self._serve, name="broadcast of weights", daemon=True).start()

    def _serve(self) -> None:
        for number in itertools.count(1):
            while not self.store.check([f"request/{number}"]):
                time.sleep(_POLL_S)
            key, version, num_receivers = json.loads(self.store.get(f"request/{number}"))
            try:
                self._send(key, version, num_receivers)
            except RuntimeError as error:  # a receiver has died, which its own side reports; the next may come
                _log.warning("Weights of version %d did not reach all of %s: %s", version, key, error)

    def _send(self, key: str, version: int, num_receivers: int) -> None:
        export = self.latest
        assert export is not None
        refusal = f"Version {version} of the weights was asked for, but the trainer has {export.version} by now."
        is_latest = version == export.version
        self.store.set(f"{key}/answer", json.dumps(["" if is_latest else refusal, num_receivers]))
        if is_latest:  # and stays as it is, because it is mapped
            _broadcast(_join(self.store, key, 0, num_receivers), [np.asarray(b.data) for b in export.buckets])


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
