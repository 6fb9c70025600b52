"""Errors that cross the process boundary. Each one names role, rank, node and method."""

import os
import traceback
from dataclasses import dataclass, field, fields, replace
from typing import Any

from verl_like.single_controller.shortage import Shortage, shortage_of


class _MadeOfFields:
    """An error that crosses the process boundary as its class and its fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        error: Any = self
        arguments = tuple(getattr(self, each.name) for each in fields(error))
        return type(self), arguments


@dataclass(eq=False, repr=False)
class WorkerError(_MadeOfFields, RuntimeError):
    """A worker's method raised."""

    role: str
    rank: int
    node: str
    """The address."""
    pid: int
    method: str
    cause: str
    """The worker's traceback, as text."""
    # It is no attribute of the class: Ray's error of a call, which is of this class too, would have
    # that in place of the value.
    shortage: Shortage | None = field(default_factory=lambda: None)
    """None unless memory was short."""

    def __post_init__(self) -> None:
        message = f"{self.headline()}\n{self.cause.rstrip()}"
        if self.shortage:
            message += f"\n{self.shortage.processes}"
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
        renamed = replace(self, method=method)
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


@dataclass(eq=False, repr=False)
class CallTimeout(_MadeOfFields, TimeoutError):
    """A call, or the start of a group, did not finish in time. The workers are left as they are."""

    role: str
    method: str
    seconds: float
    waiting_for: str

    def __post_init__(self) -> None:
        super().__init__(
            f"{self.role}.{self.method} did not finish within {self.seconds:.3g} s: waiting for "
            f"{self.waiting_for}"
        )


class PlacementError(ValueError):
    """The cluster cannot hold the resource pools. The message has a table of requested against
    available resources."""
