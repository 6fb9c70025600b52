"""How a call's arguments are split over the ranks of a group, and how their results become one
value."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_like.protocol import DataProto
from verl_like.single_controller.shard import BatchShard, Splittable

# (group, *args, **kwargs) -> (one list per argument, one list per keyword), each list with one
# entry per rank.
DispatchFn = Callable[..., tuple[tuple[list[Any], ...], dict[str, list[Any]]]]
CollectFn = Callable[..., Any]  # (group, outputs of the collected ranks) -> the caller's value
Arguments = tuple[list[Any], dict[str, Any]]
"""The positional arguments and the keyword arguments of a call."""


@dataclass(frozen=True)
class Mesh:
    """Which shard each rank works on, and which ranks hold the result, in row order."""

    dp_ranks: list[int]
    collect_ranks: list[int]

    @property
    def dp_size(self) -> int:
        return len(self.collect_ranks)

    @classmethod
    def from_coordinates(
        cls, role: str, mesh_name: str, coordinates: Sequence[tuple[int, bool]]
    ) -> "Mesh":
        """Makes the mesh of the coordinates of all ranks. Raises ValueError unless exactly one rank
        of every dp_rank is collected."""
        dp_ranks = [dp_rank for dp_rank, _ in coordinates]
        collect_ranks = [rank for rank, (_, is_collect) in enumerate(coordinates) if is_collect]
        collect_ranks.sort(key=dp_ranks.__getitem__)
        num_shards = len(set(dp_ranks))
        collected = [dp_ranks[rank] for rank in collect_ranks]
        if collected != list(range(num_shards)):
            raise ValueError(
                f"mesh {mesh_name!r} of {role}: dp_ranks must count up from 0 without gaps, and "
                "exactly one rank of each must be collected, got (dp_rank, is_collect) by rank "
                f"{list(coordinates)}"
            )
        return cls(dp_ranks, collect_ranks)


class WorkerGroupLike(Protocol):
    """What dispatch functions use of a worker group."""

    role: str
    world_size: int

    def split(self, data: Splittable, count: int) -> list[BatchShard]: ...

    def mesh(self, mesh_name: str) -> Mesh: ...


@dataclass(frozen=True)
class DispatchMode:
    """A named pair of a dispatch function and a collect function.

    `collect_ranks(group)` is set for modes whose result is one batch: it lists, in row order, the
    ranks that hold it, and makes the future of a call a DataProtoFuture. In other modes all ranks
    are collected.

    `call_fn(method, *args, **kwargs)` is set for modes that make a call out of other calls, or
    prepare it: it returns the future. `method` is the group's; `method.send` runs it on the ranks.
    It is not asked where a subclass has a method of its own in the place of the registered one, nor
    for a batch that is Ordered or the future of one: there the method runs on the ranks.
    """

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    collect_ranks: Callable[[WorkerGroupLike], list[int]] | None = None
    call_fn: Callable[..., Any] | None = None


@dataclass(frozen=True)
class PerRank:
    """Marks an argument of an ALL_TO_ALL method, of which rank i receives `values[i]`."""

    values: Sequence[Any]


def map_arguments(
    operation: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Arguments:
    """Returns the arguments after `operation` was done on each of them."""
    mapped_args = [operation(value) for value in args]
    mapped_kwargs = {name: operation(value) for name, value in kwargs.items()}
    return mapped_args, mapped_kwargs


def dispatch_each(spread: Callable[[WorkerGroupLike, Any], Sequence[Any]]) -> DispatchFn:
    """Returns the dispatch function that does `spread(group, value)` with every argument.

    `spread` returns one entry per rank.
    """

    def dispatch(group: WorkerGroupLike, *args: Any, **kwargs: Any) -> Any:
        spread_over_group = functools.partial(spread, group)
        rank_args, rank_kwargs = map_arguments(spread_over_group, args, kwargs)
        return tuple(rank_args), rank_kwargs

    return dispatch


def replicate(group: WorkerGroupLike, value: Any) -> list[Any]:
    return [value] * group.world_size


def split_batch(group: WorkerGroupLike, value: Any) -> list[Any]:
    """Splits a batch, or the future of one, over the ranks. Every rank gets anything else whole."""
    if not isinstance(value, Splittable):
        return replicate(group, value)
    return group.split(value, group.world_size)


def unwrap_per_rank(group: WorkerGroupLike, value: Any) -> Sequence[Any]:
    if not isinstance(value, PerRank):
        return replicate(group, value)
    if len(value.values) != group.world_size:
        raise ValueError(
            f"got {len(value.values)} values for the {group.world_size} ranks of {group.role}: "
            "give one for each rank"
        )
    return value.values


def one_element_per_rank(group: WorkerGroupLike, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"DP_COMPUTE takes a list or tuple with one element for each of {group.world_size} "
            f"ranks of {group.role}, got {type(value).__name__}; ONE_TO_ALL gives every rank the "
            "same value"
        )
    return unwrap_per_rank(group, PerRank(value))


dispatch_one_to_all = dispatch_each(replicate)
dispatch_dp_compute_proto = dispatch_each(split_batch)


def dispatch_dp_compute_proto_with_func(group: WorkerGroupLike, *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else "nothing"
    if not callable(first):
        raise ValueError(f"DP_COMPUTE_PROTO_WITH_FUNC takes a callable first, got {first!r}")
    return dispatch_dp_compute_proto(group, *args, **kwargs)


def collect_list(group: Any, outputs: list[Any]) -> list[Any]:
    return outputs


def collect_rank_zero(group: Any, outputs: list[Any]) -> Any:
    return outputs[0]


def collect_batch(group: Any, outputs: list[Any]) -> DataProto:
    for rank, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            raise ValueError(
                f"rank {rank} of {group.role} returned {type(output).__name__}, but this dispatch "
                "mode concatenates DataProtos: return one, or register the method with "
                "DP_COMPUTE_METRIC (a list of per-rank results)"
            )
    return DataProto.concat(outputs)


def all_ranks(group: WorkerGroupLike) -> list[int]:
    return list(range(group.world_size))


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Any]:
    """Makes the dispatch over the data-parallel dimension of the mesh that the workers registered
    under `mesh_name`.

    Ranks with the same dp_rank receive the same shard; the results of the ranks with is_collect are
    concatenated.
    """

    def spread(group: WorkerGroupLike, value: Any) -> list[Any]:
        if not isinstance(value, Splittable):
            return replicate(group, value)
        mesh = group.mesh(mesh_name)
        shards = group.split(value, mesh.dp_size)
        return [shards[dp_rank] for dp_rank in mesh.dp_ranks]

    return {
        "name": f"MESH[{mesh_name}]",
        "dispatch_fn": dispatch_each(spread),
        "collect_fn": collect_batch,
        "collect_ranks": lambda group: group.mesh(mesh_name).collect_ranks,
    }


class Dispatch:
    """The dispatch modes. `register_dispatch_mode` adds to them."""

    RANK_ZERO = DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_rank_zero)
    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_list)
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", dispatch_each(unwrap_per_rank), collect_list)
    DP_COMPUTE = DispatchMode("DP_COMPUTE", dispatch_each(one_element_per_rank), collect_list)
    DP_COMPUTE_PROTO = DispatchMode(
        "DP_COMPUTE_PROTO", dispatch_dp_compute_proto, collect_batch, all_ranks
    )
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", dispatch_dp_compute_proto_with_func, collect_batch, all_ranks
    )
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", dispatch_dp_compute_proto, collect_list)


def register_dispatch_mode(
    name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Adds `Dispatch.<name>`.

    `dispatch_fn(group, *args, **kwargs)` returns one list per argument with one entry per rank
    (`group.world_size`, `group.split(batch, count)`); `collect_fn(group, outputs)` turns the
    results of all ranks into the caller's value, and sees only `group.role` and `group.world_size`.
    """
    if not name.isidentifier() or name != name.upper():
        raise ValueError(
            f"a dispatch mode is named in capitals like Dispatch.ONE_TO_ALL, got {name!r}"
        )
    if hasattr(Dispatch, name):
        raise ValueError(f"Dispatch.{name} exists already: choose another name")
    mode = DispatchMode(name, dispatch_fn, collect_fn)
    setattr(Dispatch, name, mode)
    return mode
