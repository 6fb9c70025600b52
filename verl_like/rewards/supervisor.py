"""The supervisor of a reward process, which is its parent process. When the reward process ends or
has to end, the supervisor ends all programs that the process has started.

A reward process is a fork of its supervisor, which runs no custom code. A program whose parent has
ended becomes a child of the supervisor (PR_SET_CHILD_SUBREAPER). So the supervisor also finds
programs in sessions of their own.
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
"""The exit code of a supervisor whose process used too much memory."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1
_END_S = 5.0
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def supervise(parent_pid: int, max_memory_bytes: int) -> None:
    """Forks this process. The child returns and becomes the reward process. The parent becomes its
    supervisor and never returns.

    The supervisor ends with the child's exit code or signal. It ends with `MEMORY_EXIT_CODE` if the
    child and the programs below it use more than `max_memory_bytes`. It ends by SIGTERM too, which
    the driver sends to stop it, or the kernel when the driver has died. `parent_pid` is the process
    id of the driver. This works only on Linux. On other systems nothing is supervised.
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
    # Its copy of the socket is closed, so that the driver's end closes when the child ends.
    os.closerange(3, 1 << 16)
    code = _watch(child, max_memory_bytes)
    _end_descendants()
    _end_as(code)


def descendants(pid: int) -> list[int]:
    """Returns the ids of the processes below a process. Those that start or end meanwhile may be
    missed."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children = [int(child) for child in path.read_text().split()]
            found += children
            for child in children:
                found += descendants(child)
    return found


def kill_all(pids: list[int]) -> None:
    """Kills processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _watch(child: int, max_memory_bytes: int) -> int:
    """Waits until the child has ended or has to end. Returns how the supervisor has to end: an exit
    code, or minus the number of a signal."""
    while True:
        received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if received and received.si_signo == signal.SIGTERM:
            return -signal.SIGTERM
        # Takes all that have ended, orphans too. While `child` is not taken there is something to
        # wait for, so waitpid does not raise.
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                # It is less than MEMORY_EXIT_CODE, which always means the limit.
                return min(os.waitstatus_to_exitcode(status), MEMORY_EXIT_CODE - 1)
            if not ended:
                break
        num_bytes = sum(_resident_bytes(pid) for pid in descendants(os.getpid()))
        if num_bytes > max_memory_bytes:
            return MEMORY_EXIT_CODE


def _resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process. Pages that several processes share count for each
    of them."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:  # it has ended
        return 0
    return int(fields[1]) * resource.getpagesize()


def _end_descendants() -> None:
    """Kills all processes below this one, and those that they start meanwhile. It gives up after
    `_END_S` seconds."""
    deadline = time.monotonic() + _END_S
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while time.monotonic() < deadline:
            kill_all(descendants(os.getpid()))
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def _end_as(code: int) -> NoReturn:
    """Ends this process with an exit code or, if the code is negative, by the signal whose number
    is minus the code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with_parent(number: int, parent_pid: int) -> None:
    """Has the kernel send this process a signal when its parent dies. Ends the process at once if
    the parent has died already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)
