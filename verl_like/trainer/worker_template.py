"""A process that has imported what workers need: each worker of a Ray that a run starts here is a fork of it.

The imports take seconds of CPU time in every process that makes them, a fork takes milliseconds. It imports while the
driver checks its inputs. Ray starts a worker with the command line `WorkerTemplate.command`, this file as a script: it
hands its arguments, environment and standard streams to the template and lives as long as the fork.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerTemplate:
    """A template that imports, or waits for workers to start."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]

    @property
    def command(self) -> str:
        """What Ray starts workers with in place of Python."""
        return shlex.join([sys.executable, "-S", "-E", __file__, _socket_in(self.folder.name)])

    def close(self) -> None:
        """Ends the template; the workers live on."""
        self.process.kill()
        self.process.wait(timeout=60)
        self.folder.cleanup()


def start(modules: Sequence[str]) -> WorkerTemplate:
    """Starts a template of these modules, without waiting for it; it ends with this process.

    None of them imports Ray: as it is imported, it reads the environment, which is another one in each worker.
    """
    folder = tempfile.TemporaryDirectory(prefix="verl_like_")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_socket_in(folder.name))  # in a folder of this user alone
        listener.listen(128)
        command = [sys.executable, "-m", "verl_like.trainer.worker_template", str(listener.fileno()), *modules]
        # A number of threads that libraries read as they are loaded; a fork sets its own where it computes.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
    return WorkerTemplate(process, folder)


def _socket_in(folder: str) -> str:
    return os.path.join(folder, "socket")


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Imports, then forks a worker for each connection until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is the driver's business
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave no zombie
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what is here is no garbage of a fork, and stays shared memory
    while sys.stdin.buffer not in select.select([listener, sys.stdin.buffer], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_worker(connection)
            return
        connection.close()


def _become_worker(connection: socket.socket) -> None:
    """Runs the script of a connection as a process of its own would; the connection ends with it."""
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not message.endswith(b"\0"):
        message += connection.recv(1 << 20)
    request = json.loads(message[:-1])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    if (torch := sys.modules.get("torch")) and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which torch read as it was imported
    runpy.run_path(sys.argv[0], run_name="__main__")


def ask_for_fork(path: str, arguments: list[str]) -> None:
    """Has the template at `path` run a script, and waits for its end; without a template, runs it here."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        os.execv(sys.executable, [sys.executable, *arguments])
    blocked = list(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    message = json.dumps(request | {"blocked_signals": blocked}).encode() + b"\0"
    sent = socket.send_fds(connection, [message], [0, 1, 2])
    connection.sendall(message[sent:])
    with contextlib.suppress(ConnectionError):
        connection.recv(1)


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first.isdecimal():
        serve(socket.socket(fileno=int(first)), rest)
    else:
        ask_for_fork(first, rest)
