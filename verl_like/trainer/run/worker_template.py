"""Starts a process that imports what workers need. If Ray is started here, each worker is a fork of
this process.

The imports take seconds of CPU time in each process, but a fork takes milliseconds. Ray starts a
worker by `WorkerTemplate.command`, which runs the script `worker_fork.py`. The script asks the
template for a fork, and ends when the fork does.
"""

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
from pathlib import Path
from typing import TextIO

from verl_like.claims import claim, remove_abandoned
from verl_like.trainer.run import worker_fork


@dataclass(frozen=True)
class WorkerTemplate:
    """A running template."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    mark: TextIO
    """A file that marks the folder as in use."""

    @property
    def command(self) -> str:
        """The command by which Ray starts workers, instead of that of Python."""
        socket_path = f"{self.folder.name}/socket"
        words = [sys.executable, "-S", "-E", worker_fork.__file__, socket_path]
        return shlex.join(words)

    def close(self) -> None:
        """Ends the template, but not the workers."""
        self.process.kill()
        self.process.wait(timeout=60)
        self.folder.cleanup()
        self.mark.close()


def start(modules: Sequence[str]) -> WorkerTemplate:
    """Starts a template that imports these modules, and returns at once. The template ends with
    this process. Files that templates of killed processes left are removed.

    No module may import Ray. Ray reads the environment when it is imported, but each worker has
    another environment.
    """
    remove_abandoned(Path(tempfile.gettempdir()), "verl_like_*")
    folder = tempfile.TemporaryDirectory(prefix="verl_like_")
    mark = claim(Path(folder.name))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.name}/socket")  # only this user can open the folder
        listener.listen(128)
        command = [
            sys.executable,
            "-m",
            "verl_like.trainer.run.worker_template",
            str(listener.fileno()),
            *modules,
        ]
        # Libraries read the number of threads when they are loaded. A fork sets its own number.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment
        )
    return WorkerTemplate(process, folder, mark)


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Imports the modules, then forks a worker for each connection until standard input ends. It
    returns only in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles an interrupt of the terminal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave no zombie
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # forks do not touch these objects when they collect garbage, so memory is shared
    standard_input = sys.stdin.buffer
    while True:
        ready, _, _ = select.select([listener, standard_input], [], [])
        if standard_input in ready:
            break
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_worker(connection)
            return
        connection.close()
    # Python is not shut down, because libraries would then report objects on the terminal, also
    # that of a killed driver.
    os._exit(0)


def _become_worker(connection: socket.socket) -> None:
    """Runs the script that a connection asks for, as a new process would. The connection closes
    when this process ends, which the sender waits for. If the sender ends before its request is
    complete, no script is run."""
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not message.endswith(b"\0"):
        received = connection.recv(1 << 20)
        if not received:
            return
        message += received
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
    torch = sys.modules.get("torch")
    num_threads = os.environ.get("OMP_NUM_THREADS")
    if torch and num_threads is not None:
        # torch read the variable when it was imported.
        torch.set_num_threads(int(num_threads))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    number, *names = sys.argv[1:]
    serve(socket.socket(fileno=int(number)), names)
