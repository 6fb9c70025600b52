"""The one Ray actor class: a process of a pool that holds the workers of one or several roles."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.worker
from ray._raylet import setproctitle  # type: ignore[attr-defined]
from ray.exceptions import GetTimeoutError, RayTaskError

from verl_like.single_controller.call import CallHeader
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.invoke import Invoker
from verl_like.single_controller.ray.message import flatten_result, restore_arguments
from verl_like.single_controller.worker import Worker, reserve_port
from verl_like.single_controller.worker_group import ClassWithInitArgs

# [role, method, args, kwargs, deadline in seconds], with arguments as by `flatten_arguments`: one list, for Ray packs
# each argument of a call on its own.
Message = list[Any]


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker process is and where Ray writes its log."""

    pid: int
    node: str
    node_id: str
    logs_dir: str


class WorkerProcess:
    """Runs one method at a time, in the order of submission."""

    def __init__(self) -> None:
        self.node = ray.util.get_node_ip_address()
        self.invoker = Invoker(self.node)
        self.classes: dict[str, type] = {}
        self.workers: dict[str, Worker] = {}
        self.start_error: WorkerError | None = None

    def reserve_master(self) -> tuple[str, int]:
        """Address and port for the store of the group's process group. The port is reserved as long as this runs."""
        self.port_socket, port = reserve_port()
        return self.node, port

    def start(self, master: tuple[str, int], classes: dict[str, ClassWithInitArgs]) -> ProcessInfo:
        """Make the workers, once the group's master address is known."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
        type(self).__name__ = f"{'+'.join(classes)} rank {os.environ['RANK']}"  # what Ray shows in `ps` between calls
        for role, class_with_args in classes.items():
            self.classes[role] = class_with_args.cls
            try:
                self.workers[role] = class_with_args()
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                rank = int(os.environ["RANK"])
                self.start_error = WorkerError(role, rank, self.node, os.getpid(), "__init__", text)
                raise self.start_error from error
        return self.info()

    def info(self) -> ProcessInfo:
        ray_node: Any = ray._private.worker._global_node
        logs_dir = ray_node.get_logs_dir_path()
        return ProcessInfo(os.getpid(), self.node, ray.get_runtime_context().get_node_id(), logs_dir)

    def master(self) -> tuple[str, int]:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def role_classes(self) -> dict[str, type]:
        return self.classes

    @ray.method(num_returns=2)
    def call(self, message: Message) -> tuple[CallHeader, Any]:
        """Run a method of a role; batches in the arguments are references, fetched within the deadline."""
        return self._run(message)

    def _run(self, message: Message) -> tuple[CallHeader, Any]:
        *_, header, result = self._stream(message)
        return header, result

    def call_whole(self, message: Message) -> list[Any]:
        """Like `call`, as one object: [fields of the header, result]. The message ends with whether the result is
        collected; it is left out if not."""
        *message, is_collected = message
        header, result = self._run(message)
        return [list(vars(header).values()), flatten_result(result if is_collected else None)]

    @ray.method(num_returns="streaming")
    def stream(self, message: Message) -> Iterator[Any]:
        """Like `call`, for a method that yields: what it yields, as it comes, then the header, then the result."""
        yield from self._stream(message)

    def _stream(self, message: Message) -> Iterator[Any]:
        role, method, args, kwargs, deadline_s = message
        if self.start_error is not None:
            raise self.start_error
        worker = self.workers[role]
        setproctitle(f"ray::{role} rank {worker.rank} {method}")  # until the call ends
        restored = list(restore_arguments(args).values()), restore_arguments(kwargs)
        return self.invoker.stream(role, worker, method, *restored, lambda references: fetch(references, deadline_s))


def fetch(references: Sequence[Any], timeout: float) -> list[Any]:
    """Values of references, in order; what is no reference passes through.

    Raises the WorkerError of a call that failed, TimeoutError after `timeout` seconds.
    """
    wanted = [reference for reference in references if isinstance(reference, ray.ObjectRef)]
    if not wanted:
        return list(references)
    try:
        values = iter(ray.get(wanted, timeout=timeout))
    except RayTaskError as error:
        raise _worker_error(error) from None
    except GetTimeoutError:
        raise TimeoutError(
            f"the results of earlier calls, which are the input here, took more than {timeout:g} s"
        ) from None
    return [next(values) if isinstance(reference, ray.ObjectRef) else reference for reference in references]


def _worker_error(error: RayTaskError) -> Exception:
    return error.cause if isinstance(error.cause, WorkerError) else error
