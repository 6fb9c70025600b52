"""Errors that cross the process boundary. Each one names role, rank, node and method."""

import os
import traceback
from typing import Any

from verl_like.single_controller.shortage import Shortage, shortage_of


class WorkerError(RuntimeError):
    """A worker's method raised.

    Attributes: role, rank, node (address), pid, method, cause (the worker's traceback, as text) and
    shortage (None unless memory was short).
    """

    def __init__(
        self,
        role: str,
        rank: int,
        node: str,
        pid: int,
        method: str,
        cause: str,
        shortage: Shortage | None = None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.node = node
        self.pid = pid
        self.method = method
        self.cause = cause
        self.shortage = shortage
        message = f"{self.headline()}\n{cause.rstrip()}"
        if shortage:
            message += f"\n{shortage.processes}"
        super().__init__(message)

    @classmethod
    def of(
        cls, error: BaseException, role: str, rank: int, node: str, method: str
    ) -> "WorkerError":
        """Returns the failure of a method of this process that raised an error."""
        cause = "".join(traceback.format_exception(error))
        shortage = shortage_of(error)
        return cls(role, rank, node, os.getpid(), method, cause, shortage)

    def headline(self) -> str:
        _, _, last_line = self.cause.rstrip().rpartition("\n")
        return f"{self.where()} failed in {self.method}{self.reason()}: {last_line}"

    def in_method(self, method: str) -> "WorkerError":
        """Returns the same failure, named after the method of which the failed one was a part."""
        renamed = type(self)(
            self.role, self.rank, self.node, self.pid, method, self.cause, self.shortage
        )
        renamed.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            renamed.add_note(note)
        return renamed

    def reason(self) -> str:
        if self.shortage is None:
            return ""
        return f" for want of {self.shortage.memory} memory"

    def where(self) -> str:
        return f"{self.role} rank {self.rank} (node {self.node}, pid {self.pid})"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (
            self.role,
            self.rank,
            self.node,
            self.pid,
            self.method,
            self.cause,
            self.shortage,
        )
        return type(self), arguments


class WorkerDied(WorkerError):
    """A worker's process died, and the other processes of its group have been killed. `cause` holds
    its last log lines."""

    def headline(self) -> str:
        died = f"{self.where()} died during {self.method}{self.reason()}"
        return f"{died}; the other processes of the group were stopped"


class WorkerStopped(WorkerDied):
    """A worker's process, or one that it started, was stopped, such as by SIGSTOP. The group has
    been killed."""

    def headline(self) -> str:
        stopped = f"{self.where()} was stopped, such as by SIGSTOP, during {self.method}"
        return f"{stopped}; the processes of its group were killed"


class CallTimeout(TimeoutError):
    """A call, or the start of a group, did not finish in time. The workers are left as they are."""

    def __init__(self, role: str, method: str, seconds: float, waiting_for: str) -> None:
        self.role = role
        self.method = method
        self.seconds = seconds
        self.waiting_for = waiting_for
        super().__init__(
            f"{role}.{method} did not finish within {seconds:.3g} s: waiting for {waiting_for}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.role, self.method, self.seconds, self.waiting_for)
        return type(self), arguments


class PlacementError(ValueError):
    """The cluster cannot hold the resource pools. The message has a table of requested against
    available resources."""
