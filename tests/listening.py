"""Where the processes of a run listen, and whether the page of ports lists them."""

import contextlib
import ipaddress
import re
import threading
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[1] / "docs/placement.md"
POLL_S = 0.2


class Listeners(threading.Thread):
    """Looks for the listening TCP sockets of this process and its descendants, as /proc/net/tcp and
    tcp6 show them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: set[tuple[str, str]] = set()
        """(process, address) of each that was seen."""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(POLL_S):
            for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):  # it has ended
                    sockets = process.net_connections("tcp")
                    listening = [
                        each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN
                    ]
                    self.found |= {(kind_of(process), address) for address in listening}

    def end(self) -> set[tuple[str, str]]:
        self.ended.set()
        self.join(60)
        return self.found


def kind_of(process: psutil.Process) -> str:
    """What the page calls a process."""
    command = process.cmdline()
    if process.pid == psutil.Process().pid:
        return "the run's own process"
    if not command:
        raise psutil.NoSuchProcess(process.pid)  # it ends
    if command[0].startswith("ray::") and not command[0].startswith(
        ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    ):
        return "makers, trainers and workers"
    scripts = [Path(argument).name for argument in command if argument.endswith(".py")]
    return (scripts or [Path(command[0]).name.strip()])[0]


def kinds_of_page() -> set[str]:
    """The processes in the table of ports."""
    table = PAGE.read_text().split("## Ports\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `?([^`|]+?)`? \|", table, re.MULTILINE)) - {"process"}


def assert_loopback(found: set[tuple[str, str]]) -> None:
    elsewhere = {each for each in found if not is_loopback(each[1])}
    assert not elsewhere
    assert {kind for kind, _ in found} <= kinds_of_page()


def is_loopback(address: str) -> bool:
    """::ffff:127.0.0.1, at which an IPv6 socket takes connections of IPv4, is one too."""
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
