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
from verl_like.workers.weights.arrival import StaleWeightsError, WeightSyncError
from verl_like.workers.weights.exports import WeightExport
from verl_like.workers.weights.shared_memory import SharedMemoryTransport, SharedPages, with_data

_TIMEOUT = timedelta(minutes=10)
"""How long a whole update may take. It waits for the updates of other rollout groups."""
_BUCKET_TIMEOUT = timedelta(minutes=1)
"""How long a bucket may take, and joining once the trainer is ready."""
_IDLE = timedelta(days=20)
"""How long a trainer waits for the next request of weights. A wait at a store cannot be longer than
2**31 ms."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file whose text is the same in all processes of a node, and differs between nodes."""
_log = logging.getLogger(__name__)


class GlooTransport(SharedMemoryTransport):
    """Every rank of the trainer broadcasts its buckets to one process of each node.

    The trainer goes on meanwhile: a thread of its process serves one worker group after the other.
    A process that receives writes into memory that the other ranks of its node map, and that the
    worker groups which are served later map too. Connections and process groups are kept from
    update to update, until one fails or other processes receive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sender: _Sender | None = None
        self._links: dict[tuple[str, int], _Link] = {}
        """The links to ranks of the trainer, by the address of their store."""
        self._received: Sequence[WeightExport] = ()
        """What was received last. It holds the pages that another process wrote."""

    def publish(self, export: WeightExport) -> WeightExport:
        sender = self._sender or _Sender()
        self._sender = sender
        published = super().publish(export)
        sender.latest = replace(published, address=sender.address)
        return sender.latest

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        received = []
        links = self._links
        self._links = {}
        # One after the other, so that two worker groups never wait for each other's trainer.
        for export in exports:
            assert export.address is not None, "published by a transport without a store"
            link = links.get(export.address)
            if link is None:
                host, port = export.address
                store = dist.TCPStore(host, port, timeout=_TIMEOUT)
                link = _Link(store)
            pages = self._receive_from(link, export, worker)
            received.append(with_data(export, pages))
            self._links[export.address] = link
        # Segments of earlier updates are dropped where another group has received since.
        self._segments = self._latest + self._written
        self._keep_written()
        self._received = received
        return received

    def _receive_from(
        self, link: "_Link", export: WeightExport, worker: Worker
    ) -> list[SharedPages]:
        """Returns where on this node the buckets of an export are, which the trainer's rank at the
        other end of the link has sent."""
        node = _BOOT_ID.read_text()
        staged = f"staged/{export.version}/{node}"
        key, pages = link.meet(export.version, worker, staged)
        pages_of_node = f"{key}/{node}"
        if link.group:
            arrays = []
            for bucket in export.buckets:
                num_bytes = bucket.data.nbytes
                arrays.append(self.allocate(num_bytes, pinned=False))
            _broadcast(link.group, arrays)
            pages = self._hand_out(arrays)
        if worker.local_rank > 0:
            pages = _read_pages(link.store, pages_of_node)
        assert pages is not None, "a group without a sender is told where they are"
        if worker.local_rank == 0:
            fields_of_pages = [astuple(each) for each in pages]
            addresses = json.dumps(fields_of_pages)
            link.store.set(staged, addresses)
            link.store.set(pages_of_node, addresses)
        if link.group:
            # The trainer ends this group's turn when the pages are in its store.
            link.group.barrier().wait(_BUCKET_TIMEOUT)
        return pages


@dataclass
class _Link:
    """What a rank of the rollout keeps for receiving from a rank of the trainer: the store of that
    rank, at which all ranks of the rollout meet, and a process group."""

    store: dist.Store
    group: Any = None
    """The group of the trainer's rank and those that received from it at the last update; None on
    ranks that did not."""

    def meet(
        self, version: int, worker: Worker, staged: str
    ) -> tuple[str, list[SharedPages] | None]:
        """Waits for the turn of this worker group, and joins the trainer where this rank is to
        receive: then `group` is set.

        Returns the name of the update, and pages in which the weights are on this node already:
        only in the node's rank 0, and only if an earlier worker group has left them at the key
        `staged`. Raises StaleWeightsError if the trainer has other weights by now.
        """
        key = self._ask_for(version, worker)
        refusal = self.store.get(f"{key}/turn").decode()
        if refusal:
            raise StaleWeightsError(refusal)
        leads = worker.local_rank == 0
        pages = None
        # If the process that had the pages has ended, this rank receives them anew.
        with contextlib.suppress(WeightSyncError, OSError):
            if leads and self.store.check([staged]):
                staged_pages = _read_pages(self.store, staged)
                pages = [each.held() for each in staged_pages]
        receives = leads and pages is None
        received_before = self.group is not None
        has_changed = receives != received_before
        rank = self.store.add(f"{key}/receivers", int(receives))
        self.store.add(f"{key}/changes", int(has_changed))
        num_decided = self.store.add(f"{key}/decided", 1)
        if num_decided == worker.world_size:
            self.store.set(f"{key}/members", "")
        if receives:
            self.group = _join(self.store, key, rank, self.group)
        else:
            self.group = None
        return key, pages

    def _ask_for(self, version: int, worker: Worker) -> str:
        """Returns the name of the update, which the last rank of the worker group asks for.

        A failed update may be repeated. Every rank comes once for each try, and so the number of
        earlier visits tells the tries apart.
        """
        host, port = worker.get_master_addr_port()
        rollout = f"{host}:{port}"
        counter = f"{version}/{rollout}"
        num_earlier_visits = self.store.add(counter, 1) - 1
        num_earlier_tries = num_earlier_visits // worker.world_size
        key = f"{counter}/{num_earlier_tries}"
        num_arrived = self.store.add(f"{key}/arrived", 1)
        if num_arrived == worker.world_size:
            number = self.store.add("requests", 1)
            request = json.dumps([key, rollout, version])
            self.store.set(f"request/{number}", request)
        return key


def _read_pages(store: dist.Store, key: str) -> list[SharedPages]:
    """Reads the addresses that the store has at a key."""
    addresses = json.loads(store.get(key))
    return [SharedPages(*address) for address in addresses]


class _Sender:
    """A rank of the trainer: a store at which receivers ask for weights, and a thread that
    broadcasts the latest ones to them."""

    def __init__(self) -> None:
        host = address_towards(os.environ["MASTER_ADDR"])
        self.store = open_store(host, timeout=_TIMEOUT)
        self.address = host, self.store.port
        self.latest: WeightExport
        self.groups: dict[str, Any] = {}
        """Process groups, each by the worker group that is in it."""
        thread = threading.Thread(target=self._serve, name="broadcast of weights", daemon=True)
        thread.start()

    def _serve(self) -> None:
        """Answers requests one after the other, as long as the process runs."""
        for number in itertools.count(1):
            request = f"request/{number}"
            self.store.wait([request], _IDLE)
            asked = self.store.get(request)
            key, rollout, version = json.loads(asked)
            self.store.delete_key(request)
            self._delete_keys_before(key, rollout, version)
            try:
                self._send(key, rollout, version)
            # A receiver has died, which its own driver reports; other groups are still served.
            except RuntimeError as error:
                _log.warning(
                    "Weights of version %d did not reach all of %s: %s", version, key, error
                )

    def _delete_keys_before(self, key: str, rollout: str, version: int) -> None:
        """Deletes what the store has of a worker group's updates before the update `key`, and where
        earlier weights are.

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
            latest = str(self.latest.version)
            is_earlier_page = first == "staged" and others[0] != latest
            if is_of_group or is_earlier_page:
                self.store.delete_key(name)

    def _send(self, key: str, rollout: str, version: int) -> None:
        """Broadcasts the latest weights for the update `key` of a worker group, or refuses if they
        are not of this version any more."""
        export = self.latest
        arrays = []
        # Newer weights may be written into the pages already. What is mapped stays as it is.
        with contextlib.suppress(StaleWeightsError):
            arrays = [np.asarray(bucket.data) for bucket in export.buckets]
        # The group is put back when all has gone well.
        group = self.groups.pop(rollout, None)
        is_new = group is None
        self.store.add(f"{key}/changes", int(is_new))
        if version != export.version or export is not self.latest:
            refusal = (
                f"Version {version} of the weights was asked for, but the trainer has "
                f"{self.latest.version} by now."
            )
            self.store.set(f"{key}/turn", refusal)
            return
        self.store.set(f"{key}/turn", "")
        group = _join(self.store, key, 0, group)
        _broadcast(group, arrays)
        group.barrier().wait(_BUCKET_TIMEOUT)
        self.groups[rollout] = group


def _join(store: dist.Store, key: str, rank: int, group: Any) -> Any:
    """Waits until all ranks have decided whether they receive, and returns the group of the trainer
    and those that do. It is `group` if that has the same members."""
    store.wait([f"{key}/members"], _BUCKET_TIMEOUT)
    num_changes = store.add(f"{key}/changes", 0)
    if not num_changes:
        return group
    num_receivers = store.add(f"{key}/receivers", 0)
    own_store = dist.PrefixStore(key, store)
    size = 1 + num_receivers
    # Made by hand, since the default group of the process belongs to the engine.
    return dist.ProcessGroupGloo(own_store, rank, size, _BUCKET_TIMEOUT)


def _broadcast(group: Any, arrays: Sequence[np.ndarray]) -> None:
    """Broadcasts arrays, one for each bucket, from rank 0 to all others. Two are on their way at a
    time."""
    pending: deque[dist.Work] = deque()
    for array in arrays:
        tensor = torch.from_dlpack(array)
        work = group.broadcast(tensor, root=0)
        pending.append(work)
        if len(pending) == 2:
            oldest = pending.popleft()
            oldest.wait(_BUCKET_TIMEOUT)
    for work in pending:
        work.wait(_BUCKET_TIMEOUT)
