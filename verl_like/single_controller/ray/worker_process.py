"""The one Ray actor class: a process of a pool that holds the workers of one or several roles."""

import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.worker
from ray._raylet import setproctitle  # type: ignore[attr-defined]

from verl_like.single_controller.dispatch import map_arguments
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.invoke import Invoker
from verl_like.single_controller.network import listen_at
from verl_like.single_controller.ray.message import fetch, pack, unpack
from verl_like.single_controller.worker import Worker, reserve_port
from verl_like.single_controller.worker_group import ClassWithInitArgs

# [role, method, packed args, packed kwargs, deadline in seconds, whether the result is collected]:
# one list, for Ray packs each argument of a call on its own.
Message = list[Any]

_LONGEST_FOLDER = 70
"""The most characters of a folder for temporary files. The path of a socket has at most 107, and
vLLM's names have 36."""


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
        listen_at(self.node)
        self.invoker = Invoker(self.node)
        self.workers: dict[str, Worker] = {}
        self.start_error: WorkerError | None = None

    def reserve_master(self) -> tuple[str, int]:
        """Returns address and port for the store of the group's process group. The port is reserved
        as long as this process runs."""
        self.port_socket, port = reserve_port()
        return self.node, port

    def start(self, master: tuple[str, int], classes: dict[str, ClassWithInitArgs]) -> ProcessInfo:
        """Makes the workers, once the group's master address is known."""
        ray_node: Any = ray._private.worker._global_node
        _keep_temporary_files_with_the_session(ray_node)
        address, port = master
        os.environ["MASTER_ADDR"] = address
        os.environ["MASTER_PORT"] = str(port)
        rank = int(os.environ["RANK"])
        # What Ray shows in `ps` between calls
        type(self).__name__ = f"{'+'.join(classes)} rank {rank}"
        for role, class_with_args in classes.items():
            try:
                self.workers[role] = class_with_args()
            except Exception as error:
                self.start_error = WorkerError.of(error, role, rank, self.node, "__init__")
                raise self.start_error from error
        node_id = ray.get_runtime_context().get_node_id()
        logs_dir = ray_node.get_logs_dir_path()
        return ProcessInfo(os.getpid(), self.node, node_id, logs_dir)

    @ray.method(num_returns=2)
    def call(self, message: Message) -> tuple[Any, Any]:
        """Runs a method of a role, and returns its header and its result, packed.

        References in the arguments are fetched within the deadline.
        """
        *_, header, result = self._run(message)
        is_collected = message[-1]
        if not is_collected:
            result = None
        return pack(header), pack(result)

    @ray.method(num_returns="streaming")
    def stream(self, message: Message) -> Iterator[Any]:
        """Does what `call` does, for a method that yields.

        It yields what the method yields, as it comes, then the header, then the result.
        """
        for output in self._run(message):
            yield pack(output)

    def _run(self, message: Message) -> Iterator[Any]:
        role, method, packed_args, packed_kwargs, deadline_s, _ = message
        if self.start_error is not None:
            raise self.start_error
        worker = self.workers[role]
        setproctitle(f"ray::{role} rank {worker.rank} {method}")  # until the call ends
        arguments = map_arguments(unpack, packed_args, packed_kwargs)
        fetch_in_time = functools.partial(fetch, timeout=deadline_s)
        return self.invoker.run(role, worker, method, arguments, fetch_in_time)


def _keep_temporary_files_with_the_session(ray_node: Any) -> None:
    """Keeps in Ray's session folder what libraries leave behind when they are killed, such as vLLM
    its rendezvous."""
    # Compiled code outlives a session.
    compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    folder = f"{ray_node.get_session_dir_path()}/tmp"
    if len(folder) > _LONGEST_FOLDER:
        return
    os.makedirs(folder, exist_ok=True)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = folder
