"""A server of chat completions that is scripted: a thread that streams the same to all."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = "408"
CHUNK = {
    "id": "reply",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "policy",
    "choices": [
        {"index": 0, "finish_reason": "stop", "delta": {"role": "assistant", "content": ANSWER}}
    ],
}
STREAM = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the name is the library's
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(STREAM)))
        self.end_headers()
        self.wfile.write(STREAM)

    def log_message(self, *_unused: object) -> None:
        pass


@contextlib.contextmanager
def scripted_server() -> Iterator[str]:
    """Yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
