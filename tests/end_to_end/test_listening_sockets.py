"""Where the processes of a run listen: on one machine at loopback addresses alone, and the page
lists who does."""

import contextlib
import ipaddress
import re
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import GRPO, SPLIT, run_apart, run_on_ray, tiny_run_settings

pytestmark = pytest.mark.ray
PAGE = Path(__file__).parents[2] / "docs/placement.md"
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


def test_a_run_of_several_ranks_listens_at_loopback_addresses_alone(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *SPLIT, "trainer.val_before_train=false"]
    listeners = Listeners()
    listeners.start()
    run_on_ray(
        [*settings, "trainer.test_freq=-1", "actor_rollout_ref.rollout.weight_transport=gloo"]
    )
    found = listeners.end()
    assert_loopback(found)
    assert {"gcs_server", "raylet", "makers, trainers and workers"} <= {kind for kind, _ in found}


@pytest.mark.proof
def test_a_detached_run_of_two_trainers_listens_at_loopback_addresses_alone(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, "detached.num_trainers=2"]
    listeners = Listeners()
    listeners.start()
    assert run_apart([*settings, "actor_rollout_ref.rollout.weight_transport=gloo"]) == 0
    found = listeners.end()
    assert_loopback(found)
    assert "the run's own process" in {kind for kind, _ in found}, "where the trainers meet"


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.parametrize(
    "settings",
    [["tensor_model_parallel_size=2"], ["name=vllm_async", "weight_transport=shared_memory"]],
)
def test_vllm_listens_at_loopback_addresses_alone(
    settings: list[str], tmp_path: Path, tiny_llama: Callable
):
    own = [
        *tiny_run_settings(tmp_path, tiny_llama, engine="vllm"),
        *SPLIT,
        "trainer.val_before_train=false",
    ]
    listeners = Listeners()
    listeners.start()
    run_on_ray(
        [*own, "trainer.test_freq=-1", *(f"actor_rollout_ref.rollout.{each}" for each in settings)]
    )
    assert_loopback(listeners.end())
