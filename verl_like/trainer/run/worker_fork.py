"""The script that Ray starts in place of a worker: it asks a `WorkerTemplate` for a fork, and ends
when the fork does.

It sends its arguments, environment and standard streams. It imports the standard library alone, to
start at once.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def ask_for_fork(path: str, arguments: list[str]) -> None:
    """Has the template at `path` run a script, and waits for the script's end.

    Without a template it runs the script here.
    """
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
    template, *script = sys.argv[1:]
    ask_for_fork(template, script)
