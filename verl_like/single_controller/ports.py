"""A TCP port that stays free for the one who asked."""

from __future__ import annotations

import socket


def reserve_port() -> tuple[socket.socket, int]:
    """A free port, and the socket that keeps the system from giving it to anyone else until it is closed.

    The socket is bound with SO_REUSEADDR but does not listen: a server that sets SO_REUSEADDR, as torch's TCPStore
    does, can listen on the port meanwhile.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder, holder.getsockname()[1]
