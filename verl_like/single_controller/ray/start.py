"""Starts a Ray on this machine, or joins the one that is named, and ends it."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import ray
import ray._private.parameter
import ray._private.services
import ray._private.worker
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from verl_like.claims import claim, remove_abandoned, remove_claimed
from verl_like.single_controller.failure import PlacementError
from verl_like.single_controller.network import error_of
from verl_like.single_controller.ray import setup_worker

ANSWER_DEADLINE_S = 8.0
ENDING_S = 10.0
"""The longest wait for the folder of a Ray that was ended to become empty."""

_claims: dict[Path, TextIO] = {}
"""The session folder of each Ray that this process started, and what marks it as in use."""


def require_cluster(address: str) -> None:
    """Raises PlacementError unless a Ray answers at `address` within 10 s. `ray.init` itself waits
    for minutes."""

    def ask() -> None:
        found = canonicalize_bootstrap_address(address)
        assert found is not None
        # As ray.init does: other addresses are not sent this machine's token unasked
        if address == "auto":
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        host, _, port = found.rpartition(":")
        # Fails at once if nothing listens.
        target = (host.strip("[]"), int(port))
        connection = socket.create_connection(target, ANSWER_DEADLINE_S)
        connection.close()
        GcsClient(address=found)

    error = error_of(ask, ANSWER_DEADLINE_S, "ask Ray")
    if error is not None:
        raise PlacementError(
            f"no Ray cluster can be joined at {address} ({error}), which "
            "ray_kwargs.ray_init.address or RAY_ADDRESS names: give host:port of a running one, "
            "or neither of the two to start Ray on this machine."
        )


def make_auth_token(path: Path) -> None:
    """Makes the token of a Ray that is started here, unless there is one.

    Its owner alone can read it. Ray's own file is readable for others.
    """
    is_given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if is_given or mode.lower() != "token":
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    only_new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, only_new, 0o600)
        with open(descriptor, "w") as file:
            file.write(generate_new_authentication_token())


@contextlib.contextmanager
def needed_processes_alone() -> Iterator[None]:
    """Within it, `ray.init` starts no process that a run on one machine does not use.

    Otherwise there are monitors of the autoscaler and of the workers' logs, and the server of the
    dashboard, which without its pages only reports over the network that Ray is used. They take 2 s
    of CPU time at each start, and Ray has no public setting for them. Ray then starts its
    workers by `setup_worker`, which does not import Ray.
    """
    parameter: Any = ray._private.parameter
    services: Any = ray._private.services
    parameters_before = parameter.RayParams
    server_before = services.start_api_server
    parameter.RayParams = partial(
        parameters_before,
        no_monitor=True,
        include_log_monitor=False,
        setup_worker_path=setup_worker.__file__,
    )
    services.start_api_server = lambda *_arguments, **_options: (None, None)  # no URL, no process
    try:
        yield
    finally:
        parameter.RayParams = parameters_before
        services.start_api_server = server_before


def start_ray(address: str | None, num_cpus: int | None, worker_command: str | None = None) -> None:
    """Joins the cluster at `address`. Without one it starts a new Ray, even if another one runs on
    this machine.

    `worker_command` takes the place of Python in the command line of that Ray's workers. The
    folders of Rays whose driver was killed are removed. Raises PlacementError if there is no
    cluster at the address, or this machine is not a part of it.
    """
    if not address:
        sessions = Path(get_default_ray_temp_dir())
        remove_abandoned(sessions, "session_*")
    # An error of a worker is reported once, by the call that waits for it.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would start a worker for each CPU slot, none of which has the environment of a rank.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray's handler of failures takes SIGTERM for one and aborts the driver 3 s later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    # To a Ray that is started here this machine is 127.0.0.1, and so its processes listen there
    # alone. Ray has this setting for macOS, and takes the machine's address in the network
    # otherwise, also where it is told 127.0.0.1.
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = bool(address)
    options: dict[str, Any] = {"address": address}
    processes: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not address:
        processes = needed_processes_alone()
        options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        if worker_command:
            options["runtime_env"] = {"py_executable": worker_command}
        token_file = Path.home() / ".ray" / "auth_token"
        make_auth_token(token_file)
    try:
        with processes:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        if not address:
            node: Any = ray._private.worker._global_node
            session = Path(node.get_session_dir_path())
            _claims[session] = claim(session)
    except ConnectionError as error:
        raise PlacementError(
            f"the Ray cluster at {address} cannot be joined from this machine "
            f"({error.__cause__ or error}): start the run on one of its nodes."
        ) from error
    except SystemExit:  # what Ray makes of SIGTERM
        raise KeyboardInterrupt from None
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_ray(keep_logs: bool) -> None:
    """Ends the Ray that this process started, and removes its folder unless the logs are kept. A
    Ray that was only joined goes on.

    Kept logs are removed when the next Ray starts.
    """
    ray.shutdown()
    for session, mark in _claims.items():
        if not keep_logs:
            with contextlib.suppress(OSError):  # somebody else removed it
                remove_claimed(session, ENDING_S)  # Ray's agents end a moment later
            # Only a link to nothing is removed. That of another Ray stays.
            latest = session.with_name("session_latest")
            if latest.is_symlink() and not latest.exists():
                latest.unlink(missing_ok=True)
        mark.close()  # the claim ends, so the next start may remove what is left
    _claims.clear()
