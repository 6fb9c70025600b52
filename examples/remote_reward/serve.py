"""Serves a reward function over HTTP: `python -m examples.remote_reward.serve my_reward.py`.

A POST to /score with a sample as JSON is scored in reward processes and answered with the score.
"""

import argparse
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_like.rewards.manager import RewardFunctionSpec, RewardManager, RewardSample
from verl_like.rewards.remote import TOKEN_VARIABLE

MAX_CONNECTIONS = 128
REQUEST_S = 30.0
"""Seconds that a client has to send its request."""
_DISCARD_S = 1.0
_MAX_REQUEST_BYTES = 16 * 1024 * 1024


class RewardServer(ThreadingHTTPServer):
    """Scores what is posted with `token` as bearer token; closing it first answers the requests
    that have begun.

    It answers one request a connection, and closes those above `MAX_CONNECTIONS` at once: the
    client tries again.
    """

    daemon_threads = False
    manager: RewardManager
    token: str

    def __init__(self, address: tuple[str, int]) -> None:
        self.places = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # However slowly it sends, byte by byte: a client has so long for the whole request.
        deadline = threading.Timer(REQUEST_S, request.shutdown, [socket.SHUT_RD])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self.places.release()


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: RewardServer

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "")
        expected = f"Bearer {self.server.token}"
        if not hmac.compare_digest(given.encode(), expected.encode()):
            return self._refuse(401, "the bearer token is missing or wrong")
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 20 and int(length) <= _MAX_REQUEST_BYTES):
            return self._refuse(
                413, f"the request needs a Content-Length of at most {_MAX_REQUEST_BYTES} bytes"
            )
        body = self.rfile.read(int(length))
        if self.path != "/score":
            return self._reply(404, "samples are posted to /score")
        try:
            sample = RewardSample("the request", **json.loads(body))
        except (ValueError, TypeError, RecursionError) as error:
            return self._reply(400, f"the request is not a sample as JSON: {error}")
        (answer,) = self.server.manager.submit([sample]).answers()
        if answer.error:
            return self._reply(422, answer.error)
        self._reply(200, {**answer.extra, "score": answer.score})

    def _refuse(self, status: int, content: object) -> None:
        """Replies before the body is read, and then throws away what comes of it: a close would
        reset the connection, and the client might not see the reply."""
        self._reply(status, content)
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(_DISCARD_S)
        num_bytes = 0
        with contextlib.suppress(OSError):
            while num_bytes < _MAX_REQUEST_BYTES and (part := self.connection.recv(1 << 16)):
                num_bytes += len(part)

    def _reply(self, status: int, content: object) -> None:
        reply = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *arguments: object) -> None:
        """One line for each sample would hide the messages of the reward function."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.remote_reward.serve", description=__doc__
    )
    parser.add_argument(
        "path", nargs="?", help="a Python file or pkg://module; default: rewards by data source"
    )
    parser.add_argument(
        "--name", default="compute_score", help="the function in it (default: compute_score)"
    )
    parser.add_argument(
        "--num-workers", type=int, default=2, help="processes that score (default: 2)"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=30.0, help="seconds for one sample (default: 30)"
    )
    parser.add_argument(
        "--max-memory-gb", type=float, default=4.0, help="10^9 bytes of a process (default: 4)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one (default: 8000)")
    options = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE, "")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        if not token and not socket.gethostbyname(options.host).startswith("127."):
            raise ValueError(
                f"--host={options.host} can be reached from other machines: set {TOKEN_VARIABLE} "
                "to a secret that the clients have as well, or listen on 127.0.0.1"
            )
        server = RewardServer((options.host, options.port))
        server.manager = RewardManager(
            RewardFunctionSpec(options.path, options.name),
            options.num_workers,
            options.timeout_s,
            max_memory_gb=options.max_memory_gb,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    server.token = token or secrets.token_urlsafe()
    if not token:
        sys.stdout.write(f"export {TOKEN_VARIABLE}={server.token}\n")
    sys.stdout.write(
        f"serving {options.path or 'rewards by data source'} at "
        f"http://{options.host}:{server.server_port}/score\n"
    )
    sys.stdout.flush()
    with contextlib.closing(server.manager), server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
