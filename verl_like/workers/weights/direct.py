"""What the transports `nccl` and `ipc` have in common. This has not been run on a GPU yet."""

import os
import socket
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from verl_like.single_controller.worker import reserve_port
from verl_like.workers.weights.exports import Allocate, NamedTensor, OrderedWeight, WeightExport
from verl_like.workers.weights.gathering import whole_tensors
from verl_like.workers.weights.transport import WeightTransport


def init_info(
    exports: Sequence[WeightExport], first_rank: int, num_receivers: int
) -> dict[str, Any]:
    """Returns the settings with which vLLM's engine joins the group of rank 0 of the trainer and
    all receivers, who come after it.

    `first_rank` is the rank among the receivers of the first process of the engine's replica.
    """
    addresses = [export.address for export in exports if export.address]
    ((host, port),) = addresses  # rank 0 alone has one
    return {
        "master_address": host,
        "master_port": port,
        "rank_offset": 1 + first_rank,
        "world_size": 1 + num_receivers,
        "packed": True,  # as `send` packs the weights
    }


def gather(weights: Iterable[OrderedWeight]) -> Iterator[NamedTensor]:
    """Yields the names and whole tensors of files of `in_order`, one by one. It is a collective
    call if there are DTensors."""
    for weight in weights:
        tensor = weight.tensor.detach().to(weight.dtype)
        [whole] = whole_tensors([tensor], is_kept=True)
        for file in weight.files:
            # vLLM packs the memory of what it is given.
            yield file.name, file.of(whole).contiguous()


class DirectTransport(WeightTransport):
    """An export says which parameters come and which fingerprints they must have; `send` brings the
    values while an engine loads them."""

    allocate: Allocate | None = None

    def __init__(self) -> None:
        self._ports: dict[str, tuple[socket.socket, int]] = {}
        """The reserved port at which rank 0 waits for some receivers, by the receivers' name."""
        self._groups: dict[str, Any] = {}
        """On rank 0: vLLM's group of it and some receivers, by the receivers' name. The group of a
        maker that has died stays, since ending it would mean to wait for that maker."""
        self._group: Any = None
        """On rank 0: the group of the receivers that load now."""

    def address(self, rank: int, receivers: str = "") -> tuple[str, int] | None:
        """Returns where rank 0 waits for these receivers, who join it once; None on other ranks."""
        if rank > 0:
            return None
        if receivers not in self._ports:
            self._ports[receivers] = reserve_port()
        _socket, port = self._ports[receivers]
        return os.environ["MASTER_ADDR"], port

    def publish(self, export: WeightExport) -> WeightExport:
        address = self.address(export.rank)
        return replace(export, address=address)

    @contextmanager
    def joined(self, rank: int, num_receivers: int, receivers: str = "") -> Iterator[None]:
        """Makes the context in which `send` is called. All ranks of the trainer call it.

        When these receivers are sent weights for the first time, rank 0 waits 5 minutes for them to
        join.
        """
        address = self.address(rank, receivers)
        if address and receivers not in self._groups:
            host, port = address
            world_size = 1 + num_receivers
            self._groups[receivers] = self._join(host, port, world_size)
        self._group = self._groups.get(receivers)
        yield

    @abstractmethod
    def _join(self, host: str, port: int, world_size: int) -> Any:
        """Returns vLLM's group of rank 0 and the receivers."""

    @abstractmethod
    def send(self, weights: Sequence[OrderedWeight], rank: int) -> None:
        """Has the receivers load what was exported last, in the order of `in_order`. It is a
        collective call of all ranks of the trainer."""
