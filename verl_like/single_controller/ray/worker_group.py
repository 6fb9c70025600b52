"""The Ray backend of worker groups."""

from collections.abc import Sequence

from verl_like.protocol import CallHeader, DataProto, Part, PendingCall
from verl_like.single_controller.decorator import MethodSpec
from verl_like.single_controller.dispatch import Arguments, map_arguments
from verl_like.single_controller.ray.call import RayCall, RayStream, UnreportedCalls
from verl_like.single_controller.ray.column_store import COLUMN_STORE
from verl_like.single_controller.ray.message import pack
from verl_like.single_controller.ray.process_handles import ProcessHandles
from verl_like.single_controller.ray.resource_pool import RayResourcePool
from verl_like.single_controller.worker_group import ClassWithInitArgs, OnCall, WorkerGroup

RayClassWithInitArgs = ClassWithInitArgs  # verl's name


def create_colocated_worker_cls(
    class_dict: dict[str, ClassWithInitArgs],
) -> dict[str, ClassWithInitArgs]:
    """Describes one process per rank that holds a worker of each role. Their calls run one at a
    time.

    `RayWorkerGroup.spawn` gives a group for each role.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    return class_dict


create_colocated_worker_raw_cls = create_colocated_worker_cls  # verl's other name


class RayWorkerGroup(WorkerGroup):
    """The workers of one role on a resource pool.

    Construction reserves the pool and starts the processes without waiting for them; the first
    result that is waited for also reports a failed start.

    Args:
        resource_pool: where the processes run, one per rank.
        ray_cls_with_init: the worker class, or the result of create_colocated_worker_cls. The group
            of several roles has no registered methods: `spawn` gives the groups that have them.
        role: name in messages, events and actor names. It is not used for the result of
            create_colocated_worker_cls, whose roles are joined by +.
        name_prefix: actor names are `{name_prefix}_{rank}`; by default the role and a random
            suffix.
        worker_env: further environment variables of the processes.
        deadline_s: how long a call may take, in seconds, where `.get(timeout)` does not say
            otherwise.
        on_call: gets the CallEvent of every finished call of every rank, at the latest on shutdown;
            of a stream, when it was read to its end.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs | dict[str, ClassWithInitArgs],
        *,
        role: str = "worker",
        name_prefix: str | None = None,
        worker_env: dict[str, str] | None = None,
        deadline_s: float = 3600.0,
        on_call: OnCall | None = None,
    ) -> None:
        with_args = ray_cls_with_init
        if not isinstance(with_args, dict):
            with_args = {role: with_args}
        joined = "+".join(with_args)
        processes = ProcessHandles(joined, resource_pool, with_args, name_prefix, worker_env or {})
        classes = {name: with_args[name].cls for name in with_args}
        self._attach(processes, classes, joined, deadline_s, on_call)

    def _attach(
        self,
        processes: ProcessHandles,
        classes: dict[str, type],
        role: str,
        deadline_s: float,
        on_call: OnCall | None,
    ) -> None:
        self.processes = processes
        self.workers = processes.actors
        """The actor handles, by rank."""
        self.worker_names = processes.names
        """The names of the actors in Ray, by rank."""
        self._classes = classes
        self.deadline_s = deadline_s
        self._unreported = UnreportedCalls(role, self.report)
        world_size = len(self.workers)
        worker_cls = classes.get(role)  # None for several roles that are joined
        super().__init__(worker_cls, role, world_size, processes.pool.name, on_call)

    def spawn(self, roles: Sequence[str]) -> dict[str, "RayWorkerGroup"]:
        """Returns a group for each of the colocated roles, on the same processes."""
        unknown = sorted(set(roles) - set(self._classes))
        if unknown:
            raise ValueError(
                f"roles {unknown} are not on these processes, which hold {sorted(self._classes)}"
            )
        groups = {}
        for role in roles:
            group = RayWorkerGroup.__new__(RayWorkerGroup)
            group._attach(self.processes, self._classes, role, self.deadline_s, self.on_call)
            groups[role] = group
        return groups

    @property
    def worker_pids(self) -> list[int]:
        return [info.pid for info in self.processes.wait_until_started()]

    @property
    def worker_nodes(self) -> list[str]:
        """The addresses of the nodes, by rank."""
        return [info.node for info in self.processes.wait_until_started()]

    def put(self, data: DataProto) -> Part:
        header = CallHeader(len(data))
        return Part(header, COLUMN_STORE.put(data))

    def submit(
        self, spec: MethodSpec, calls: list[Arguments], collect_ranks: list[int]
    ) -> PendingCall:
        if self.processes.stopped is not None:
            raise self.processes.stopped
        references = []
        with self.processes.submitting:
            for rank, arguments in enumerate(calls):
                actor = self.workers[rank]
                run = actor.stream if spec.streams else actor.call
                packed = map_arguments(pack, *arguments)
                is_collected = rank in collect_ranks
                message = [self.role, spec.name, *packed, self.deadline_s, is_collected]
                references.append(run.remote(message))
        # A RayCall adds itself to the unreported calls. A RayStream reports itself when it was read
        # to its end.
        call_class = RayStream if spec.streams else RayCall
        return call_class(
            references, self.processes, self._unreported, spec.name, self.deadline_s, collect_ranks
        )

    def look_for_stopped(self, method: str) -> None:
        self.processes.end_stopped(method)

    def report_finished_calls(self) -> None:
        self._unreported.report_finished({})

    def shutdown(self) -> None:
        """Kills the processes, which colocated roles share, and gives the pool's slot back."""
        self.report_finished_calls()
        self.processes.stop(RuntimeError(f"the worker group {self.role} was shut down"))
