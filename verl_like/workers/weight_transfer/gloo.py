"""Weights broadcast over the network with gloo: once to every node, whose processes then share the
memory."""

import contextlib
import itertools
import json
import logging
import os
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

from verl_like.single_controller.network import address_towards, open_store
from verl_like.single_controller.worker import Worker
from verl_like.workers.weight_sync import StaleWeightsError, WeightExport, WeightSyncError
from verl_like.workers.weight_transfer.shared_memory import (
    SharedMemoryTransport,
    SharedPages,
    with_data,
)

_TIMEOUT = timedelta(minutes=10)
"""For all of an update, behind those of other rollout groups."""
_BUCKET_TIMEOUT = timedelta(minutes=1)
"""For a bucket, and for all to join once the trainer is ready."""
_IDLE = timedelta(days=20)
"""For the next request of weights; a wait at a store cannot be longer than 2**31 ms."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # by which processes of a node know each other
_log = logging.getLogger(__name__)


class GlooTransport(SharedMemoryTransport):
    """Every rank of the trainer broadcasts its buckets to one process of each node.

    The trainer goes on meanwhile: a thread of its process serves one worker group after the other.
    A process that receives writes into memory that the other ranks of its node map, and the worker
    groups that are served later too. Connections and process groups last from update to update,
    until one fails or others receive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sender: _Sender | None = None
        self._links: dict[tuple[str, int], _Link] = {}
        self._received: Sequence[WeightExport] = ()
        """Last; pages that another process wrote are held."""

    def publish(self, export: WeightExport) -> WeightExport:
        self._sender = self._sender or _Sender()
        self._sender.latest = replace(super().publish(export), address=self._sender.address)
        return self._sender.latest

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        received: list[WeightExport] = []
        links = self._links
        self._links = {}
        node = _BOOT_ID.read_text()
        # One after the other: two worker groups never wait for each other's trainer
        for export in exports:
            assert export.address is not None, "published by a transport without a store"
            link = links.get(export.address) or _Link(
                dist.TCPStore(*export.address, is_master=False, timeout=_TIMEOUT)
            )
            staged = f"staged/{export.version}/{node}"
            key, pages = link.meet(export.version, worker, staged)
            if link.group:
                arrays = [self.allocate(bucket.data.nbytes, False) for bucket in export.buckets]
                _broadcast(link.group, arrays)
                pages = self._hand_out(arrays)
            if worker.local_rank == 0:
                assert pages is not None, "a group without a sender is told where they are"
                for place in (staged, f"{key}/{node}"):
                    link.store.set(place, json.dumps([astuple(each) for each in pages]))
            else:
                pages = [
                    SharedPages(*address) for address in json.loads(link.store.get(f"{key}/{node}"))
                ]
            if link.group:
                # What is staged is known before another group's turn
                link.group.barrier().wait(_BUCKET_TIMEOUT)
            received.append(with_data(export, pages))
            self._links[export.address] = link
        # The rest goes: another group has received since
        self._segments = [*self._latest, *self._written]
        self._latest = self._written
        self._written = []
        self._received = received
        return received


@dataclass
class _Link:
    """What a rank of the rollout keeps of its way to a rank of the trainer, at whose store all
    ranks of it meet."""

    store: dist.Store
    group: Any = None
    """Of the rank of the trainer and those that received from it at the last update; None on the
    others."""

    def meet(
        self, version: int, worker: Worker, staged: str
    ) -> tuple[str, list[SharedPages] | None]:
        """The update's name, and in rank 0 of a node the pages where an earlier worker group has
        `staged` it there.

        Returns in the group's turn, with `group` where this rank is to receive. Raises
        StaleWeightsError if the trainer has other weights by now.
        """
        rollout = "{}:{}".format(*worker.get_master_addr_port())
        # A failed update may be repeated: every rank comes once for each try.
        counter = f"{version}/{rollout}"
        key = f"{counter}/{(self.store.add(counter, 1) - 1) // worker.world_size}"
        if self.store.add(f"{key}/arrived", 1) == worker.world_size:
            self.store.set(
                f"request/{self.store.add('requests', 1)}", json.dumps([key, rollout, version])
            )
        if refusal := self.store.get(f"{key}/turn").decode():
            raise StaleWeightsError(refusal)
        leads = worker.local_rank == 0
        pages = None
        with contextlib.suppress(WeightSyncError, OSError):  # the process that had them has ended
            if leads and self.store.check([staged]):
                pages = [
                    SharedPages(*address).held() for address in json.loads(self.store.get(staged))
                ]
        receives = leads and pages is None
        rank = self.store.add(f"{key}/receivers", int(receives))
        self.store.add(f"{key}/changes", int(receives == (self.group is None)))
        if self.store.add(f"{key}/decided", 1) == worker.world_size:
            self.store.set(f"{key}/members", "")
        self.group = _join(self.store, key, rank, self.group) if receives else None
        return key, pages


class _Sender:
    """A rank of the trainer: a store where receivers ask for weights, and a thread that broadcasts
    the latest."""

    def __init__(self) -> None:
        host = address_towards(os.environ["MASTER_ADDR"])
        self.store = open_store(host, timeout=_TIMEOUT)
        self.address = host, self.store.port
        self.latest: WeightExport
        self.groups: dict[str, Any] = {}
        """By the worker group that is in it."""
        threading.Thread(target=self._serve, name="broadcast of weights", daemon=True).start()

    def _serve(self) -> None:
        for number in itertools.count(1):
            self.store.wait([f"request/{number}"], _IDLE)
            key, rollout, version = json.loads(self.store.get(f"request/{number}"))
            self.store.delete_key(f"request/{number}")
            self._delete_keys_before(key, rollout, version)
            try:
                self._send(key, rollout, version)
            # A receiver has died, which its own side reports; the next may come
            except RuntimeError as error:
                _log.warning(
                    "Weights of version %d did not reach all of %s: %s", version, key, error
                )

    def _delete_keys_before(self, key: str, rollout: str, version: int) -> None:
        """Deletes what the store has of earlier updates of a worker group, and where earlier
        weights are.

        Nobody reads that any more: all ranks of the group have come for the update `key`, and wait
        for their turn.
        """
        for name in self.store.list_keys():
            first, *others = name.split("/")
            is_of_group = (
                others[:1] == [rollout]
                and not name.startswith(f"{key}/")
                and name != f"{version}/{rollout}"
            )
            is_earlier_page = first == "staged" and others[0] != str(self.latest.version)
            if is_of_group or is_earlier_page:
                self.store.delete_key(name)

    def _send(self, key: str, rollout: str, version: int) -> None:
        export = self.latest
        arrays = []
        with contextlib.suppress(StaleWeightsError):  # it is not the latest any more
            # Which stays as it is from here on
            arrays = [np.asarray(bucket.data) for bucket in export.buckets]
        is_latest = version == export.version and export is self.latest
        refusal = (
            f"Version {version} of the weights was asked for, but the trainer has "
            f"{self.latest.version} by now."
        )
        group = self.groups.pop(rollout, None)  # until all has gone well
        self.store.add(f"{key}/changes", int(group is None))
        self.store.set(f"{key}/turn", "" if is_latest else refusal)
        if is_latest:
            group = _join(self.store, key, 0, group)
            _broadcast(group, arrays)
            group.barrier().wait(_BUCKET_TIMEOUT)
            self.groups[rollout] = group


def _join(store: dist.Store, key: str, rank: int, group: Any) -> Any:
    """The group of the trainer and those that receive, once all have decided: `group` if it is
    that."""
    store.wait([f"{key}/members"], _BUCKET_TIMEOUT)
    if store.add(f"{key}/changes", 0):
        size = 1 + store.add(f"{key}/receivers", 0)
        # By hand, since the default group of the process belongs to the engine.
        group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), rank, size, _BUCKET_TIMEOUT)
    return group


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
