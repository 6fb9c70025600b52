"""The driver's handle on the ranks of one role. Registered methods become callables of the
group."""

import abc
import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_like.plugins import import_plugins
from verl_like.protocol import CallHeader, DataProto, DataProtoFuture, Future, Part, PendingCall
from verl_like.single_controller.compat import VerlWorkerGroup
from verl_like.single_controller.decorator import MethodSpec, check_reads, registered_methods
from verl_like.single_controller.dispatch import (
    Arguments,
    Dispatch,
    DispatchMode,
    Mesh,
    PerRank,
    map_arguments,
)
from verl_like.single_controller.shard import (
    BatchShard,
    ForwardedFuture,
    Ordered,
    Splittable,
    select_columns,
    split_order,
)
from verl_like.single_controller.worker import Worker

LOOK_S = 10.0
"""How long a driver waits for a call before it looks at its processes, and between two looks."""


@dataclass(frozen=True)
class CallEvent:
    """One finished call on one rank, for the timeline."""

    pool: str
    role: str
    method: str
    rank: int
    started: float
    finished: float


OnCall = Callable[[CallEvent], None]


class ClassWithInitArgs:
    """A worker class and the arguments its constructor gets on every rank."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        # verl passes ray.remote(WorkerClass); the class inside is what its process builds.
        metadata = getattr(cls, "__ray_metadata__", None)
        self.cls: Any = cls
        if metadata is not None:
            self.cls = metadata.modified_class.__ray_actor_class__
        self.args = args
        self.kwargs = kwargs
        self.plugins: tuple[str, ...] = ()
        """Modules that the worker's process imports first."""

    def __call__(self) -> Any:
        import_plugins(self.plugins)
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class WorkerGroupFacts:
    """What a collect function may ask of the group.

    It may run on a worker of another group, so it gets no more.
    """

    role: str
    world_size: int


class WorkerGroup(VerlWorkerGroup):
    """Base of the Ray and the local backend. `group.method(...)` and `group.method.remote(...)`
    call the ranks."""

    deadline_s: float = math.inf
    """How long a call may take, in seconds."""
    runs_at_once: bool = False
    """True if a call runs in the thread that submits it, and others wait meanwhile."""

    def __init__(
        self,
        worker_cls: type | None,
        role: str,
        world_size: int,
        pool_name: str,
        on_call: OnCall | None,
    ) -> None:
        self.role = role
        self.world_size = world_size
        self.pool = pool_name
        self.on_call = on_call
        self._meshes: dict[str, Mesh] = {}
        self.caller: Any = None
        """What a dispatch mode's `call_fn` keeps of this group, such as the router of its
        requests."""
        if worker_cls is None:  # several roles, before spawn()
            return
        if not issubclass(worker_cls, Worker):
            raise ValueError(
                f"{worker_cls.__name__} of role {role} is not a Worker: subclass Worker"
            )
        for name, spec in registered_methods(worker_cls).items():
            method = getattr(worker_cls, name)
            if hasattr(self, name):
                raise ValueError(
                    f"{worker_cls.__name__}.{name} has the name of a worker group's attribute: "
                    "rename it"
                )
            setattr(self, name, BoundMethod(self, spec, method))

    def __getattr__(self, name: str) -> "BoundMethod":
        # Registered methods are attributes; this is called for names that are none.
        raise AttributeError(
            f"the worker group {self.__dict__.get('role', '')!r} has no registered method {name!r}"
        )

    @abc.abstractmethod
    def put(self, data: DataProto) -> Part:
        """Returns references to a batch that every rank can fetch."""

    @abc.abstractmethod
    def submit(
        self, spec: MethodSpec, calls: list[Arguments], collect_ranks: list[int]
    ) -> PendingCall:
        """Starts the method on ranks 0, 1, ... with their arguments.

        The pending call waits for all of them; its outputs and its parts are those of
        `collect_ranks`, in this order.
        """

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Stops the ranks. The group is of no use afterwards."""

    def look_for_stopped(self, method: str) -> None:
        """Raises WorkerStopped if a process of the driver's groups is found stopped, such as by
        SIGSTOP.

        For a caller that waits for `method` without a call of its own, every `LOOK_S` seconds.
        """
        return  # a backend without processes has nothing to look for

    def dispatched_by(self, name: str, mode: DispatchMode) -> "BoundMethod":
        bound = getattr(self, name, None)
        if not isinstance(bound, BoundMethod):
            raise ValueError(f"{self.role} has no registered method {name!r}: put @register on it")
        spec = replace(bound.spec, dispatch_mode=mode)
        return BoundMethod(self, spec, bound.method)

    def split(self, data: Splittable, count: int) -> list[BatchShard]:
        """Returns `count` shards, of as equal numbers of rows as possible unless an Ordered batch
        says how many.

        A DataProto is put into the backend's store once.
        """
        order = None
        sizes = None
        if isinstance(data, Ordered):
            batch = data.batch
            order = data.order
            sizes = data.sizes
        else:
            batch = data
        if isinstance(batch, DataProto):
            parts = [self.put(batch)]
        else:
            parts = batch.parts
            if batch.order is not None:
                part_rows = np.argsort(batch.order)  # where the parts have each row of the batch
                if order is not None:
                    part_rows = part_rows[order]
                order = part_rows
        rows_of_shards: Sequence[np.ndarray | None] = [None] * count
        num_rows = 0
        if order is not None:
            rows_of_shards = split_order(order, sizes, count)
            num_rows = len(order)
        return [
            BatchShard(
                tuple(parts),
                index,
                count,
                row_numbers=rows,
                num_batch_rows=num_rows,
                ordered=isinstance(data, Ordered),
            )
            for index, rows in enumerate(rows_of_shards)
        ]

    def mesh(self, mesh_name: str) -> Mesh:
        """Returns the coordinates that the ranks registered, which are asked for once."""
        if mesh_name not in self._meshes:
            coordinates = self.query_dispatch_collect_info(mesh_name)
            mesh = Mesh.from_coordinates(self.role, mesh_name, coordinates)
            self._meshes[mesh_name] = mesh
        return self._meshes[mesh_name]

    def report_finished_calls(self) -> None:
        """Reports to `on_call` the finished calls that nobody waited for."""
        return  # a backend that runs a call at once has reported it

    def report(self, method: str, rank: int, header: CallHeader) -> None:
        """Reports a finished call of one rank to `on_call`."""
        if self.on_call is not None and getattr(self, method).spec.is_recorded:
            event = CallEvent(self.pool, self.role, method, rank, header.started, header.finished)
            self.on_call(event)


class BoundMethod:
    """A registered method of a group."""

    def __init__(self, group: WorkerGroup, spec: MethodSpec, method: Callable[..., Any]) -> None:
        self.group = group
        self.spec = spec
        self.method = method
        self._signature = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the collected value if the method was registered blocking, and its future
        otherwise."""
        future = self.remote(*args, **kwargs)
        if self.spec.blocking:
            return future.get()
        return future

    def remote(self, *args: Any, **kwargs: Any) -> Future:
        """Makes the call by the mode's `call_fn`, or by `send` if there is none or it cannot take
        the arguments. Returns its future."""
        self._signature.bind(None, *args, **kwargs)
        values = (*args, *kwargs.values())
        is_plain = not any(isinstance(value, DataProtoFuture | Ordered) for value in values)
        if self.call_fn is None or not is_plain:
            return self.send(*args, **kwargs)
        self._check(values)
        return self.call_fn(self, *args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Future:
        """Submits the call to the ranks, whatever `call_fn` the mode has, and returns its future.
        In a group that `runs_at_once` the call has ended by then."""
        group = self.group
        spec = self.spec
        order = self._check((*args, *kwargs.values()))
        selected_args, selected_kwargs = map_arguments(self._selected, args, kwargs)
        # By id, what was put already: several ranks may get the same object.
        sent: dict[int, Any] = {}
        reference = functools.partial(self._reference, sent=sent)
        arguments_of_ranks = self._dispatch(selected_args, selected_kwargs)
        calls = [map_arguments(reference, *arguments) for arguments in arguments_of_ranks]
        mode = spec.dispatch_mode
        facts = WorkerGroupFacts(group.role, group.world_size)
        collect = functools.partial(mode.collect_fn, facts)
        if mode.collect_ranks is not None:
            ranks = mode.collect_ranks(group)
            call = group.submit(spec, calls, ranks)
            return DataProtoFuture(call, collect, order)
        ranks = list(range(len(calls)))
        call = group.submit(spec, calls, ranks)
        return Future(call, collect)

    @property
    def call_fn(self) -> Callable[..., Future] | None:
        """What makes the call out of other calls, if it is not left to the ranks: see
        DispatchMode."""
        if self.method is not self.spec.function:
            return None
        return self.spec.dispatch_mode.call_fn

    def _check(self, values: Sequence[Any]) -> np.ndarray | None:
        """Raises ValueError for batches that the method cannot take.

        Returns the order of the first Ordered batch, which is that of the result, or None.
        """
        ordered = [value for value in values if isinstance(value, Ordered)]
        others = [value for value in values if isinstance(value, DataProto | DataProtoFuture)]
        batches = [*others, *(value.batch for value in ordered)]
        known = [batch for batch in batches if isinstance(batch, DataProto)]
        if len(known) == len(batches):
            check_reads(self.group.role, self.spec, known)
        if not ordered:
            return None
        where = f"{self.group.role}.{self.spec.name}"
        mode = self.spec.dispatch_mode
        if others:
            raise ValueError(
                f"{where} got an Ordered batch beside another one: join them with union, or order "
                "both"
            )
        if mode.collect_ranks is None and mode is not Dispatch.DP_COMPUTE_METRIC:
            raise ValueError(
                f"{where} got an Ordered batch, but {mode.name} does not split batches: give the "
                "batch"
            )
        return ordered[0].order

    def _selected(self, value: Any) -> Any:
        """Returns a batch without the columns that the method does not read."""
        if isinstance(value, Ordered):
            batch = self._selected(value.batch)
            return Ordered(batch, value.order, value.sizes)
        columns = self.spec.sent_columns
        if isinstance(value, DataProto) and columns is not None:
            return select_columns(value, columns)
        return value

    def _dispatch(self, args: list[Any], kwargs: dict[str, Any]) -> list[Arguments]:
        """Returns the arguments of each rank that runs.

        It is rank 0 alone, or every rank with the arguments that the mode's dispatch function gives
        it. Raises ValueError for PerRank where rank 0 alone runs, and for a dispatch function that
        does not give every rank an entry of every argument.
        """
        group = self.group
        spec = self.spec
        if spec.dispatch_mode is Dispatch.RANK_ZERO:
            given = (*args, *kwargs.values())
            if any(isinstance(value, PerRank) for value in given):
                raise ValueError(
                    f"{group.role}.{spec.name} runs on rank 0 only: PerRank needs Execute.ALL"
                )
            return [(args, kwargs)]
        dispatch_fn = spec.dispatch_mode.dispatch_fn
        rank_args, rank_kwargs = dispatch_fn(group, *args, **kwargs)
        for values in (*rank_args, *rank_kwargs.values()):
            is_list = isinstance(values, list | tuple)
            if not is_list or len(values) != group.world_size:
                got = type(values).__name__
                if is_list:
                    got += f" of {len(values)}"
                raise ValueError(
                    f"the dispatch function of {group.role}.{spec.name} must return one list per "
                    f"argument with one entry for each of {group.world_size} ranks, got {got}"
                )
        return [
            map_arguments(operator.itemgetter(rank), rank_args, rank_kwargs)
            for rank in range(group.world_size)
        ]

    def _reference(self, value: Any, sent: dict[int, Any]) -> Any:
        """Returns what travels instead of a batch or a future: references that the worker
        resolves."""
        if isinstance(value, DataProto | DataProtoFuture):
            if id(value) not in sent:
                [whole] = self.group.split(value, 1)
                sent[id(value)] = self._reference(whole, sent)
            return sent[id(value)]
        if isinstance(value, BatchShard) and self.spec.sent_columns is not None:
            return replace(value, columns=self.spec.sent_columns)
        if isinstance(value, Future):
            return ForwardedFuture(tuple(value.parts), value.collect)
        return value
