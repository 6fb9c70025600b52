"""The script that Ray starts in place of a worker. It asks a `WorkerTemplate` for a fork, and ends
when the fork does.

It sends its arguments, environment and standard streams. To start at once, it imports only the
standard library.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def ask_for_fork(path: str, arguments: list[str]) -> None:
    """Has the template at the socket `path` run a script, and waits until the script has ended. If
    there is no template, the script runs in this process."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        os.execv(sys.executable, [sys.executable, *arguments])
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked_signals": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }
    message = json.dumps(request).encode() + b"\0"
    sent = socket.send_fds(connection, [message], [0, 1, 2])
    connection.sendall(message[sent:])
    with contextlib.suppress(ConnectionError):
        connection.recv(1)


if __name__ == "__main__":
    template, *script = sys.argv[1:]
    ask_for_fork(template, script)
