"""The environments of scripts/agents_environment.sh, and servers that run in them."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def environment(name: str) -> Path:
    """The programs of one of the environments, which is made if there is none."""
    script = TESTS.parent / "scripts/agents_environment.sh"
    subprocess.run(["bash", script, name], check=True, timeout=1500)
    return TESTS.parent / "build/agents" / name / "bin"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def serving(
    describe: Callable[[str], Any],
    name: str,
    program: str,
    *arguments: str,
    port: int | None = None,
    **options: Any,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs a server until it answers, with the Python of an environment.

    Args:
        describe: raises ValueError as long as no server answers at an address.
        name: the name of the environment.
        program: the path of the server's program in the folder of the tests. Its arguments are the
            port and these.
        port: any free one if it is None.
        options: variables of its environment.
    """
    programs = environment(name)
    port = port or free_port()
    command = [programs / "python", TESTS / program, str(port), *arguments]
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    with running(describe, port, command, env=os.environ | path | options) as server:
        yield f"127.0.0.1:{port}", server


@contextlib.contextmanager
def running(
    describe: Callable[[str], Any], port: int, command: Sequence[Any], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the command of a server until it answers at this port, see `serving`. The options are
    those of its process."""
    server = subprocess.Popen(command, **options)
    deadline = time.monotonic() + 300
    try:
        while True:
            try:
                describe(f"127.0.0.1:{port}")
                break
            except ValueError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        yield server
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
