"""Ray's workers as forks of one template of this test process, as those of a run are of its own."""

import atexit
import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from forked_ranks import TESTS

from verl_like.single_controller.ray.start import needed_processes_alone
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.worker_template import WorkerTemplate

FOLDERS = [str(Path(__file__).parent / name) for name in ("", "ray_cpu", "end_to_end", "oracle")]
"""Where workers find the modules of the tests."""


class SharedTemplate(WorkerTemplate):
    """A template that outlives the runs that use it. It ends with this process, or when the
    environment of the next one is another."""

    def close(self) -> None:
        pass


VLLM = ("vllm.v1.attention.backends.cpu_attn", "vllm.v1.worker.cpu_worker")
"""Most of what vLLM imports, which takes 4 s of CPU time. None of it imports Ray."""

_running: dict[tuple[str | None, ...], SharedTemplate] = {}
"""The templates that this process has started, by what of the environment they have seen, and what
they have imported besides."""
_of_all: list[SharedTemplate] = []
"""The template that this process has started for all processes of pytest-xdist, if it has."""


def shared_template(*further_modules: str) -> SharedTemplate:
    """The template of this process, which has imported what workers need.

    It looks for modules and temporary files where the environment said when it started, and what is
    measured in its forks (scripts/mutant_runs.py) counts for the test of that time.
    """
    seen = tuple(os.environ.get(name) for name in ("PYTHONPATH", "TMPDIR", "COVERED_TEST"))
    key = (*seen, *further_modules)
    if key not in _running:
        for running in [key for key in _running if key[: len(seen)] != seen]:
            WorkerTemplate.close(_running.pop(running))
        _running[key] = _start(further_modules)
    return _running[key]


def _command_of_all() -> str:
    """The command of a template with vLLM that all processes of pytest-xdist share.

    The first process that needs the template starts it and writes its command to a file, which it
    removes when it ends. The template ends with that process, and later workers start without one.
    A test that looks for workers below its own process needs the template of this process.
    """
    test_run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if test_run is None or "COVERED_TEST" in os.environ:
        return shared_template(*VLLM).command
    note = Path(tempfile.gettempdir(), f"verl_like_template_{test_run}")
    with open(note, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        command = file.read()
        if not command:
            template = _start(VLLM)
            _of_all.append(template)
            atexit.register(note.unlink, missing_ok=True)
            command = template.command
            file.write(command)
    return command


def _start(further_modules: Sequence[str]) -> SharedTemplate:
    with pytest.MonkeyPatch.context() as patch:
        found = filter(None, [os.environ.get("PYTHONPATH"), *FOLDERS])
        patch.setenv("PYTHONPATH", os.pathsep.join(found))
        if further_modules:
            # They are read when vLLM is imported, and VllmEngine sets them later.
            patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
        template = worker_template.start([*WORKERS, *TESTS, *further_modules])
    return SharedTemplate(template.process, template.folder, template.mark)


def start_ray(
    env_vars: Mapping[str, str] | None = None, *, with_vllm: bool = False, **options: Any
) -> None:
    """Starts a Ray whose workers are forks of the template."""
    command = _command_of_all() if with_vllm else shared_template().command
    # Ray would start a worker for each CPU at once.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with needed_processes_alone():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "py_executable": command,
                "env_vars": {"PYTHONPATH": os.pathsep.join(FOLDERS), **(env_vars or {})},
            },
            **options,
        )
