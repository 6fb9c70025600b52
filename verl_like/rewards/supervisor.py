"""The parent of a reward process: when that ends, or has to, every program that it started ends
too.

It is a fork of the reward process that runs none of its custom code. Programs whose own parent has
ended become its children (PR_SET_CHILD_SUBREAPER), so it finds also those that have a session of
their own.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

MEMORY_EXIT_CODE = 199
"""Exit code of a supervisor whose process used too much memory."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1
_END_S = 5.0
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def supervise(parent_pid: int, max_memory_bytes: int) -> None:
    """Forks: the child returns and goes on, the parent watches over it and never returns.

    The parent ends as its child does, with `MEMORY_EXIT_CODE` if the child and its programs used
    more than `max_memory_bytes`, or by SIGTERM, which the driver sends and which comes when the
    driver, `parent_pid`, has died. Only Linux has what this needs; elsewhere nothing is supervised.
    """
    if sys.platform != "linux":
        return
    _end_with_parent(signal.SIGTERM, parent_pid)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    supervisor = os.getpid()
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited - _SIGNALS)
        _end_with_parent(signal.SIGKILL, supervisor)
        return
    os.closerange(3, 1 << 16)  # the driver sees the end of the child as that of their socket
    code = _watch(child, max_memory_bytes)
    _end_descendants()
    _end_as(code)


def descendants(pid: int) -> list[int]:
    """The processes below a process, as far as they are seen: some may start or end meanwhile."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children = [int(child) for child in path.read_text().split()]
            found += children
            for child in children:
                found += descendants(child)
    return found


def _watch(child: int, max_memory_bytes: int) -> int:
    """Waits until the child has ended or has to end; its exit code, or minus the number of the
    signal."""
    while True:
        received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if received and received.si_signo == signal.SIGTERM:
            return -signal.SIGTERM
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return min(os.waitstatus_to_exitcode(ended[1]), MEMORY_EXIT_CODE - 1)
        if sum(map(_resident_bytes, descendants(os.getpid()))) > max_memory_bytes:
            return MEMORY_EXIT_CODE


def _resident_bytes(pid: int) -> int:
    """Pages that several processes share count for each of them."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # it has ended
        return 0


def _end_descendants() -> None:
    """Kills all processes below this one, also those that they start meanwhile; gives up after
    `_END_S`."""
    deadline = time.monotonic() + _END_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def _end_as(code: int) -> NoReturn:
    """Ends this process with an exit code, or by the signal that is minus the code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with_parent(number: int, parent_pid: int) -> None:
    """Asks for a signal when the parent dies; ends at once if it has died already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)
