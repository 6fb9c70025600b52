"""Runs a worker group in the driver's own process, for the debugger and for unit tests."""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_like.protocol import CallHeader, DataProto, Part, PendingCall
from verl_like.single_controller.decorator import MethodSpec
from verl_like.single_controller.dispatch import Arguments
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.invoke import Invoker
from verl_like.single_controller.worker import rank_environment, reserve_port
from verl_like.single_controller.worker_group import ClassWithInitArgs, OnCall, WorkerGroup

_RUNNING = threading.RLock()
"""Held while a call runs, because its rank is in the environment of this process."""


class LocalWorkerGroup(WorkerGroup):
    """A group whose ranks are objects in this process. A call runs when it is submitted, rank after
    rank.

    If several threads submit calls, of whatever groups, one runs at a time.

    Ranks cannot wait for each other, so workers that use torch.distributed need world_size 1. The
    method's own exception is the `__cause__` of the WorkerError. A call that is given the future of
    a failed call raises its error at once.
    """

    runs_at_once = True

    def __init__(
        self,
        ray_cls_with_init: ClassWithInitArgs,
        world_size: int = 1,
        *,
        role: str = "worker",
        on_call: OnCall | None = None,
    ) -> None:
        super().__init__(ray_cls_with_init.cls, role, world_size, "local", on_call)
        self._invoker = Invoker(node="local")
        self._port_socket, port = reserve_port()
        self._env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.workers: list[Any] = []
        for rank in range(world_size):
            with _RUNNING, self._environment(rank):
                self.workers.append(ray_cls_with_init())

    def put(self, data: DataProto) -> Part:
        # Its own container: a later `batch.union` of the caller does not reach into the call.
        header = CallHeader(len(data))
        return Part(header, data.select())

    def submit(
        self, spec: MethodSpec, calls: list[Arguments], collect_ranks: list[int]
    ) -> "LocalCall":
        yielded: list[Any] = []
        results = []
        for rank, arguments in enumerate(calls):
            try:
                with _RUNNING, self._environment(rank):
                    worker = self.workers[rank]
                    outputs = self._invoker.run(self.role, worker, spec.name, arguments, list)
                    *items, header, payload = outputs
            except WorkerError as error:
                return LocalCall(yielded, [], error)
            yielded += items
            results.append(Part(header, payload))
            self.report(spec.name, rank, header)
        collected = [results[rank] for rank in collect_ranks]
        return LocalCall(yielded, collected, None)

    def shutdown(self) -> None:
        if self.caller is not None:
            self.caller.close()
        for worker in self.workers:
            worker.close()
        self.workers.clear()
        self._port_socket.close()

    @contextlib.contextmanager
    def _environment(self, rank: int) -> Iterator[None]:
        """Sets the environment that a rank's process would have."""
        own = rank_environment(rank, self.world_size, rank, self.world_size, "cpu")
        values = own | self._env
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@dataclass(eq=False)
class LocalCall(PendingCall):
    """A call that has run. It has what its ranks yielded and returned, or the error of the one that
    failed."""

    yielded: list[Any]
    results: list[Part]
    error: WorkerError | None

    def wait(self, timeout: float | None) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [part.payload for part in self.results]

    def stream(self) -> Iterator[Any]:
        self.wait(None)
        yielded = self.yielded
        self.yielded = []
        return iter(yielded)

    def done(self) -> bool:
        return True

    def parts(self) -> list[Part]:
        self.wait(None)
        return self.results
