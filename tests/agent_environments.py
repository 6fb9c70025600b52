"""The environments of scripts/agents_environment.sh, and servers that run in them."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
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
    variables = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [programs / "python", TESTS / program, str(port), *arguments]
    server = subprocess.Popen(command, env=variables | options)
    deadline = time.monotonic() + 300
    try:
        while True:
            try:
                describe(f"127.0.0.1:{port}")
                break
            except ValueError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        yield f"127.0.0.1:{port}", server
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
