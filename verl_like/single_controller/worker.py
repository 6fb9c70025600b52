"""The base class of everything that runs on a resource pool."""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from verl_like.single_controller.decorator import Execute, register
from verl_like.single_controller.dispatch import Dispatch


class Worker:
    """One rank of a worker group. Registered methods (`@register`) can be called on the group.

    Rank and sizes come from the environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT, VERL_LIKE_DEVICE), which the group sets before the worker is made.
    """

    reward_columns: ClassVar[Mapping[str, float]] = {}
    """The columns (B R) that this worker writes and that make up the reward, each with its weight
    in the sum."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    _mesh_coordinates: dict[str, tuple[int, bool]]

    # In __new__, so that a subclass that does not call super().__init__() has its rank as well.
    def __new__(cls, *args: Any, **kwargs: Any) -> "Worker":
        worker = super().__new__(cls)
        worker.rank = int(os.environ.get("RANK", "0"))
        worker.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        worker.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        worker.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        worker._mesh_coordinates = {}
        return worker

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"; a CUDA worker sees only its own device, so the name needs no index."""
        return os.environ.get("VERL_LIKE_DEVICE", "cpu")

    def get_master_addr_port(self) -> tuple[str, int]:
        """Returns where rank 0 of the group may open its store. The port stays reserved as long as
        the group lives."""
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Says which shard of a batch this rank works on under mesh dispatch, and whether its
        result is collected."""
        if mesh_name in self._mesh_coordinates:
            raise ValueError(
                f"mesh {mesh_name!r} is registered already on rank {self.rank}: register it once"
            )
        self._mesh_coordinates[mesh_name] = (dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads what the worker computes with, before its other methods are called. It does nothing
        unless it is overridden."""

    def close(self) -> None:
        """Ends what the worker has started in its process, such as threads. A process of its own
        ends with them."""
        return

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_dispatch_collect_info(self, mesh_name: str) -> tuple[int, bool]:
        """Returns this rank's (dp_rank, is_collect) in a mesh."""
        if mesh_name not in self._mesh_coordinates:
            raise ValueError(
                f"mesh {mesh_name!r} is not registered on rank {self.rank} (known: "
                f"{sorted(self._mesh_coordinates)}): call "
                "self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect) in "
                "init_model"
            )
        return self._mesh_coordinates[mesh_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs func(worker, *args, **kwargs) on every rank, with batches split over the ranks. It
        returns a DataProto."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs func(*args, **kwargs) on rank 0."""
        return func(*args, **kwargs)


def rank_environment(
    rank: int, world_size: int, local_rank: int, local_world_size: int, device: str
) -> dict[str, str]:
    """Returns the environment variables by which a worker knows its place, without the master's
    address."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "VERL_LIKE_DEVICE": device,
    }


def reserve_port() -> tuple[socket.socket, int]:
    """Returns a free TCP port, and the socket that keeps the system from giving it to anyone else
    until it is closed.

    The socket is bound with SO_REUSEADDR but does not listen: a server that sets SO_REUSEADDR, as
    torch's TCPStore does, can listen on the port meanwhile.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port = holder.getsockname()[1]
    return holder, port
