"""Runs Python code of the model where it reaches nothing: no file but Python's own, no network, no
other process and no variable of the environment."""

import codecs
import functools
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import astuple, dataclass

from verl_like.rewards.supervisor import descendants, kill_all
from verl_like.workers.agents import python_sandbox
from verl_like.workers.agents.host_process import Unavailable

_END_S = 10.0
"""In so many seconds a killed process ends."""
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@dataclass(frozen=True)
class _Limits:
    """See `PythonTool`."""

    seconds: float
    memory_mb: int
    num_processes: int
    output_chars: int


class PythonTool:
    """An environment that inherits this class has a tool `python`.

    Args:
        seconds: how long code may run. It is also the CPU time of each process.
        memory_mb: the memory of each process, and of all its files together (2^20 bytes).
        num_processes: how many processes and threads it may have at once.
        output_chars: the output is cut after so many characters, and the code is ended.

    Raises:
        ValueError: no code can be run on this machine, or with these limits.
    """

    def __init__(
        self,
        seconds: float = 10.0,
        memory_mb: int = 1024,
        num_processes: int = 32,
        output_chars: int = 10_000,
    ) -> None:
        self._limits = _Limits(seconds, memory_mb, num_processes, output_chars)
        _require_sandbox(self._limits)

    def python(self, code: str) -> str:
        """Runs Python code in a new interpreter and returns what it prints.

        Args:
            code: The code. It does not see what earlier code has defined or written.
        """
        return _run(code, self._limits)


@functools.cache
def _require_sandbox(limits: _Limits) -> None:
    """Raises ValueError if no code can be run with these limits."""
    try:
        problem = _run("print('ready')", limits).removesuffix("ready\n")
    except (Unavailable, OSError) as error:
        problem = str(error)
    if problem:
        raise ValueError(
            f"PythonTool{astuple(limits)} cannot run code here ({problem}): it needs Linux 5.12 "
            "or newer where `unshare -Urn true` works, and limits that leave room for Python"
        )


def _run(code: str, limits: _Limits) -> str:
    """Runs code and returns its output. Raises Unavailable if it cannot be run."""
    reading, writing = os.pipe()
    with open(os.memfd_create("code"), "w+b", 0) as source, open(reading) as report:
        source.write(code.encode(errors="replace"))
        source.seek(0)
        popen = subprocess.Popen(
            _command(writing, limits),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            env={},
            start_new_session=True,  # signals of the code to its process group stay there
        )
        os.close(writing)
        try:
            output = _output(popen, limits)
        finally:
            _kill(popen)
        if problem := report.read():
            raise Unavailable(f"code cannot be run: {problem}")
    return output


def _command(report_fd: int, limits: _Limits) -> list[str]:
    """The command that runs the sandbox with the packages of this environment."""
    base_packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    libraries = filter(os.path.isdir, _SYSTEM_LIBRARIES)
    memory = limits.memory_mb << 20
    seconds = math.ceil(limits.seconds)
    python = os.path.realpath(sys.executable)
    return [
        python,
        "-I",
        "-S",
        python_sandbox.__file__,
        str(report_fd),
        f"{memory} {seconds} {limits.num_processes}",
        python,
        ":".join(packages),
        sys.base_prefix,
        *libraries,
        f"-{base_packages}",
        *packages,
    ]


def _output(popen: subprocess.Popen[bytes], limits: _Limits) -> str:
    """Reads the output until it ends or reaches a limit."""
    assert popen.stdout is not None
    deadline = time.monotonic() + limits.seconds
    poll = select.poll()
    poll.register(popen.stdout)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    output = ""
    while len(output) <= limits.output_chars:
        milliseconds = 1000 * (deadline - time.monotonic())
        if milliseconds <= 0 or not poll.poll(milliseconds):
            return f"{output}\n[killed after {limits.seconds:g} s]"
        block = os.read(popen.stdout.fileno(), 1 << 16)
        if not block:
            return output
        output += decoder.decode(block)
    return f"{output[: limits.output_chars]}\n[killed after {limits.output_chars} characters]"


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """Ends the program and its child, with which the kernel ends all others."""
    if popen.poll() is None:
        popen.send_signal(signal.SIGSTOP)  # it starts no child meanwhile
        kill_all(descendants(popen.pid))
        popen.kill()
    popen.wait(timeout=_END_S)
    assert popen.stdout is not None
    popen.stdout.close()
