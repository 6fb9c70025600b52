"""A process that has imported what workers need. Each worker of a Ray that is started here is a fork of it.

The imports take seconds of CPU time in each process; a fork takes milliseconds. Ray starts a worker with the command
line `WorkerTemplate.command`, this file as a script. The script sends its arguments, environment and standard streams
to the template and ends when the fork does.
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
    """A running template."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]

    @property
    def command(self) -> str:
        """What Ray starts workers with in place of Python."""
        return shlex.join([sys.executable, "-S", "-E", __file__, f"{self.folder.name}/socket"])

    def close(self) -> None:
        """Ends the template; the workers live on."""
        self.process.kill()
        self.process.wait(timeout=60)
        self.folder.cleanup()


def start(modules: Sequence[str]) -> WorkerTemplate:
    """Starts a template that imports these modules, and returns at once. The template ends with this process.

    No module may import Ray, which reads the environment when it is imported: each worker has another environment.
    """
    folder = tempfile.TemporaryDirectory(prefix="verl_like_")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.name}/socket")  # only this user can open the folder
        listener.listen(128)
        command = [sys.executable, "-m", "verl_like.trainer.worker_template", str(listener.fileno()), *modules]
        # Libraries read the number of threads when they are loaded; a fork sets its own.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
    return WorkerTemplate(process, folder)


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Imports, then forks a worker for each connection until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles an interrupt of the terminal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave no zombie
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # forks then do not collect these objects, whose memory stays shared
    while sys.stdin.buffer not in select.select([listener, sys.stdin.buffer], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_worker(connection)
            return
        connection.close()


def _become_worker(connection: socket.socket) -> None:
    """Runs the script of a connection as a new process would; the connection ends with it."""
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
