"""Where processes listen: at the address of their node, which is the loopback address where a run
has one machine."""

import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import TCPStore


def open_store(host: str, port: int = 0, **options: Any) -> TCPStore:
    """Opens a store that listens at `host` alone, with port 0 at a free port. TCPStore itself
    listens at all addresses.

    It lives as long as the object. `options` are those of TCPStore.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        **options,
    )


def store_of_group(rank: int, timeout: timedelta) -> TCPStore:
    """Returns the store in which the ranks of this process's worker group meet. Rank 0 opens it."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        return open_store(host, port, timeout=timeout)
    return TCPStore(host, port, timeout=timeout)


def address_towards(host: str) -> str:
    """Returns the address of this node at which `host` reaches it."""
    # Sends nothing: asks for the way
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address: str = probe.getsockname()[0]
        return address


def error_of(ask: Callable[[], object], limit_s: float, thread_name: str) -> Exception | None:
    """Returns the error with which `ask` ends, or None if there is none. It is a TimeoutError if
    `ask` has not ended after `limit_s` seconds."""
    answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            ask()
        except Exception as error:  # whatever it is, it is why there is no answer
            answer.put(error)
        else:
            answer.put(None)

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    thread.start()
    try:
        return answer.get(timeout=limit_s)
    except queue.Empty:
        return TimeoutError(f"no answer within {limit_s:g} s")


def listen_at(address: str) -> None:
    """Has the libraries of this process listen at an address of this node, unless the environment
    says otherwise.

    Left alone, gloo takes the address of the host's name, and NCCL and vLLM that of the first
    interface.
    """
    os.environ.setdefault("VLLM_HOST_IP", address)
    for interface, addresses in psutil.net_if_addrs().items():
        its_addresses = [each.address for each in addresses]
        if address in its_addresses:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
