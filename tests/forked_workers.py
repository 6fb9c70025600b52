"""Ray's workers as forks of one template of this test process, as those of a run are of its own."""

import atexit
import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from verl_like.single_controller.ray.start import needed_processes_alone
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.worker_template import WorkerTemplate

FOLDERS = [str(Path(__file__).parent / name) for name in ("", "ray_cpu", "end_to_end", "oracle")]
"""Where workers find the modules of the tests."""


class SharedTemplate(WorkerTemplate):
    """A template that outlives the runs that use it. It ends with this process. One of another
    environment than that of the start ends when the next environment is another again."""

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class TemplateOfAnotherProcess:
    """What a run needs of a template that another process of the same pytest has started. When that
    process has ended, workers start without the template."""

    command: str

    def close(self) -> None:
        pass


VLLM = ("vllm.v1.attention.backends.cpu_attn", "vllm.v1.worker.cpu_worker")
"""Most of what vLLM imports, which takes 4 s of CPU time. None of it imports Ray."""


def _seen_by_templates() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("PYTHONPATH", "TMPDIR", "COVERED_TEST"))


_SEEN_AT_FIRST = _seen_by_templates()
_running: dict[tuple[str | None, ...], Any] = {}
"""The templates that this process uses, by what of the environment they have seen, and what they
have imported besides."""


def shared_template(*further_modules: str) -> Any:
    """The template of this process, or of all processes of this pytest, which has imported what
    workers need.

    It looks for modules and temporary files where the environment said when it started, and what is
    measured in its forks (scripts/mutant_runs.py) counts for the test of that time.
    """
    seen = _seen_by_templates()
    key = (*seen, *further_modules)
    if key in _running:
        return _running[key]
    test_run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if test_run and seen == _SEEN_AT_FIRST and "COVERED_TEST" not in os.environ:
        _running[key] = _template_of_all(test_run, further_modules)
    else:
        kept = (seen, _SEEN_AT_FIRST)
        for other in [other for other in _running if other[: len(seen)] not in kept]:
            WorkerTemplate.close(_running.pop(other))
        _running[key] = _start(further_modules)
    return _running[key]


def _template_of_all(test_run: str, modules: Sequence[str]) -> Any:
    """The template that the processes of pytest-xdist share. The first that needs it starts it, and
    notes its command for the others until it ends itself."""
    name = "_".join(["verl_like_template", test_run, *modules])
    note = Path(tempfile.gettempdir(), name)
    with open(note, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        command = file.read()
        if command:
            return TemplateOfAnotherProcess(command)
        template = _start(modules)
        file.write(template.command)
    atexit.register(note.unlink, missing_ok=True)
    return template


def _start(further_modules: Sequence[str]) -> SharedTemplate:
    with pytest.MonkeyPatch.context() as patch:
        found = filter(None, [os.environ.get("PYTHONPATH"), *FOLDERS])
        patch.setenv("PYTHONPATH", os.pathsep.join(found))
        if further_modules:
            # They are read when vLLM is imported, and VllmEngine sets them later.
            patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
        template = worker_template.start([*WORKERS, *further_modules])
    return SharedTemplate(template.process, template.folder, template.mark)


def start_ray(
    env_vars: Mapping[str, str] | None = None, *, with_vllm: bool = False, **options: Any
) -> None:
    """Starts a Ray whose workers are forks of the template."""
    template = shared_template(*(VLLM if with_vllm else ()))
    # Ray would start a worker for each CPU at once.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with needed_processes_alone():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "py_executable": template.command,
                "env_vars": {"PYTHONPATH": os.pathsep.join(FOLDERS), **(env_vars or {})},
            },
            **options,
        )
