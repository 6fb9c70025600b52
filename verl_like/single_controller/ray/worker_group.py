"""The Ray backend of worker groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from verl_like.protocol import DataProto, Part, PendingCall
from verl_like.single_controller.call import CallEvent, CallHeader
from verl_like.single_controller.decorator import MethodSpec
from verl_like.single_controller.ray.column_store import COLUMN_STORE
from verl_like.single_controller.ray.message import flatten_arguments, restore_result
from verl_like.single_controller.ray.process_handles import READY_S, START_DEADLINE_S, ProcessHandles
from verl_like.single_controller.ray.resource_pool import RayResourcePool
from verl_like.single_controller.ray.stream import RayStream
from verl_like.single_controller.ray.worker_process import fetch
from verl_like.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

_log = logging.getLogger(__name__)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its constructor's arguments, for RayWorkerGroup."""


class ColocatedClassWithInitArgs:
    """Several roles for one process per rank; `RayWorkerGroup.spawn` gives a group for each."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        if not class_dict:
            raise ValueError("create_colocated_worker_cls needs at least one role")
        self.class_dict = dict(class_dict)


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> ColocatedClassWithInitArgs:
    """One process per rank that holds a worker of each role; their calls run one at a time."""
    return ColocatedClassWithInitArgs(class_dict)


class RayWorkerGroup(WorkerGroup):
    """The workers of one role on a resource pool.

    Construction reserves the pool and starts the processes without waiting for them; the first result that is waited
    for also reports a failed start.

    Args:
        resource_pool: where the processes run, one per rank.
        ray_cls_with_init: the worker class, or the result of create_colocated_worker_cls, to be followed by `spawn`.
        role: name in messages, events and actor names.
        name_prefix: actor names are `{name_prefix}_{rank}`; by default the role and a random suffix.
        detached: the processes outlive the driver; needs a detached pool. `from_detached` attaches to them.
        worker_env: further environment variables of the processes.
        deadline_s: how long a call may take, in seconds, where `.get(timeout)` does not say otherwise.
        on_call: is told about every finished call of every rank, at the latest on shutdown; about a stream when it was
            read to its end.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs | ColocatedClassWithInitArgs,
        *,
        role: str = "worker",
        name_prefix: str | None = None,
        detached: bool = False,
        worker_env: dict[str, str] | None = None,
        deadline_s: float = 3600.0,
        on_call: Callable[[CallEvent], None] | None = None,
    ) -> None:
        if isinstance(ray_cls_with_init, ColocatedClassWithInitArgs):
            classes, worker_cls = ray_cls_with_init.class_dict, None
            role = "+".join(classes)
        else:
            classes, worker_cls = {role: ray_cls_with_init}, ray_cls_with_init.cls
        self._attach(
            ProcessHandles.create(role, resource_pool, classes, name_prefix, detached, worker_env or {}),
            {name: class_with_args.cls for name, class_with_args in classes.items()},
            worker_cls,
            role,
            deadline_s,
            on_call,
        )

    def _attach(
        self,
        processes: ProcessHandles,
        classes: dict[str, type],
        worker_cls: type | None,
        role: str,
        deadline_s: float,
        on_call: Callable[[CallEvent], None] | None,
    ) -> None:
        self.processes, self._classes, self.deadline_s = processes, classes, deadline_s
        self._unreported: list[_SubmittedCall] = []
        super().__init__(worker_cls, role, len(processes.actors), processes.pool, on_call)

    @classmethod
    def from_detached(
        cls,
        *,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        role: str | None = None,
        deadline_s: float = 3600.0,
        on_call: Callable[[CallEvent], None] | None = None,
    ) -> RayWorkerGroup:
        """Attach to live workers by their names (in this Ray namespace) or handles, in rank order.

        `role` is needed where the processes hold several.
        """
        if (worker_names is None) == (worker_handles is None):
            raise ValueError("from_detached takes either worker_names or worker_handles")
        actors = (
            [ray.get_actor(name) for name in worker_names] if worker_names is not None else list(worker_handles or ())
        )
        classes: dict[str, type] = ray.get(actors[0].role_classes.remote(), timeout=START_DEADLINE_S)
        if role is None and len(classes) == 1:
            role = next(iter(classes))
        if role not in classes:
            raise ValueError(f"these workers hold the roles {sorted(classes)}: say which with role=..., got {role!r}")
        started = [actor.info.remote() for actor in actors]
        processes = ProcessHandles(
            role, "detached", actors, list(worker_names or [f"{role}_{rank}" for rank in range(len(actors))]), started
        )
        group = cls.__new__(cls)
        group._attach(processes, classes, classes[role], role, deadline_s, on_call)
        return group

    def spawn(self, roles: Sequence[str]) -> dict[str, RayWorkerGroup]:
        """A group for each of the colocated roles, on the same processes."""
        unknown = sorted(set(roles) - set(self._classes))
        if unknown:
            raise ValueError(f"roles {unknown} are not on these processes, which hold {sorted(self._classes)}")
        groups = {}
        for role in roles:
            groups[role] = RayWorkerGroup.__new__(RayWorkerGroup)
            groups[role]._attach(
                self.processes, self._classes, self._classes[role], role, self.deadline_s, self.on_call
            )
        return groups

    @property
    def workers(self) -> list[Any]:
        """The actor handles, by rank."""
        return self.processes.actors

    @property
    def worker_names(self) -> list[str]:
        return self.processes.names

    @property
    def worker_pids(self) -> list[int]:
        return [info.pid for info in self.processes.wait_until_started()]

    @property
    def worker_nodes(self) -> list[str]:
        """Addresses of the nodes, by rank."""
        return [info.node for info in self.processes.wait_until_started()]

    @property
    def master_address(self) -> str:
        return self._master()[0]

    @property
    def master_port(self) -> int:
        return self._master()[1]

    def _master(self) -> tuple[str, int]:
        return self.processes.wait([self.workers[0].master.remote()], self.role, "master", self.deadline_s)[0]

    def put(self, data: DataProto) -> Part:
        stored = COLUMN_STORE.put(data)
        return Part(stored, stored)  # it knows its rows itself

    def submit(
        self,
        spec: MethodSpec,
        calls: list[tuple[list[Any], dict[str, Any]]],
        collect_ranks: list[int],
        waited_for: bool,
    ) -> PendingCall:
        self.processes.check_running()
        seen: dict[int, Any] = {}
        ranks = [
            (
                actor,
                rank,
                [
                    self.role,
                    spec.name,
                    flatten_arguments(dict(enumerate(args)), seen),
                    flatten_arguments(kwargs, seen),
                    self.deadline_s,
                ],
            )
            for rank, (actor, (args, kwargs)) in enumerate(zip(self.workers, calls, strict=False))
        ]
        if spec.streams:
            return RayStream(
                self, spec.name, [actor.stream.remote(message) for actor, _, message in ranks], collect_ranks
            )
        payloads = None
        if waited_for:
            headers = [actor.call_whole.remote([*message, rank in collect_ranks]) for actor, rank, message in ranks]
        else:
            references = [actor.call.remote(message) for actor, _, message in ranks]
            headers, payloads = [header for header, _ in references], [payload for _, payload in references]
        submitted = _SubmittedCall(spec.name, headers)
        self._unreported.append(submitted)
        return RayCall(self, submitted, payloads, collect_ranks)

    def report_call(self, call: _SubmittedCall, headers: Sequence[CallHeader]) -> None:
        """Tell `on_call` about a call of which these are the headers of all ranks, and about others that finished."""
        unreported = set(call.unreported)
        self.report(
            [header for header, reference in zip(headers, call.headers, strict=True) if reference in unreported]
        )
        call.unreported = []
        self._unreported = [call for call in self._unreported if call.unreported]
        self.report_finished_calls()

    def report_finished_calls(self) -> None:
        """Tell `on_call` about the calls that have finished, also those whose futures nobody waits for."""
        headers = [header for call in self._unreported for header in call.unreported]
        if not headers:
            return
        ready = set(ray.wait(headers, num_returns=len(headers), timeout=0)[0])
        for call in self._unreported:
            for header in ready.intersection(call.unreported):
                try:
                    value = ray.get(header, timeout=READY_S)
                    self.report([value if isinstance(value, CallHeader) else CallHeader(*value[0])])
                except RayError as error:
                    if not call.waited_for:
                        _log.error("%s.%s failed and nobody waited for it: %s", self.role, call.method, error)
            call.unreported = [header for header in call.unreported if header not in ready]
        self._unreported = [call for call in self._unreported if call.unreported]

    def shutdown(self) -> None:
        """Kill the processes, which colocated roles share, and give the pool's slot back."""
        self.report_finished_calls()
        self.processes.stop(RuntimeError(f"the worker group {self.role} was shut down"))


@dataclass
class _SubmittedCall:
    """What the group keeps of a call: not its result, which is freed with the call's future."""

    method: str
    headers: list[Any]
    waited_for: bool = False

    def __post_init__(self) -> None:
        self.unreported = self.headers


class RayCall:
    """A call in flight: two references per rank, to its header and to its result.

    Without `payloads` it is one that is waited for at once: each header reference leads to (header, result), which
    takes Ray less time than two objects.
    """

    def __init__(
        self, group: RayWorkerGroup, submitted: _SubmittedCall, payloads: list[Any] | None, collect_ranks: list[int]
    ) -> None:
        self.group, self.submitted, self.headers = group, submitted, submitted.headers
        self.payloads, self.collect_ranks = payloads, collect_ranks

    def wait(self, timeout: float | None) -> list[Any]:
        timeout = self.group.deadline_s if timeout is None else timeout
        deadline = time.monotonic() + timeout
        processes, role, method = self.group.processes, self.group.role, self.submitted.method
        self.submitted.waited_for = True
        processes.wait_until_started(timeout)  # a failed start is the first thing to report
        collected = [self.payloads[rank] for rank in self.collect_ranks] if self.payloads is not None else []
        try:
            values = processes.wait(self.headers, role, method, deadline - time.monotonic(), collected)
        except RayError as error:
            raise RuntimeError(f"{role}.{method} finished, but its results were lost: {error}") from error
        num_ranks = len(self.headers)
        if self.payloads is None:
            self.group.report_call(self.submitted, [CallHeader(*header) for header, _ in values])
            return [restore_result(result) for _, result in values]
        self.group.report_call(self.submitted, values[:num_ranks])
        outputs: list[Any] = [None] * num_ranks
        for rank, output in zip(self.collect_ranks, values[num_ranks:], strict=True):
            outputs[rank] = output
        return outputs

    def stream(self) -> Iterator[Any]:
        return iter(())

    def done(self) -> bool:
        ready, _ = ray.wait(self.headers, num_returns=len(self.headers), timeout=0)
        return len(ready) == len(self.headers)

    def parts(self) -> list[Part]:
        assert self.payloads is not None, "a call that is waited for at once is not handed on"
        return [Part(self.headers[rank], self.payloads[rank]) for rank in self.collect_ranks]

    def fetch(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        return fetch(references, self.group.deadline_s if timeout is None else timeout)
