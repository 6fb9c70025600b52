"""Ray's workers as forks of one template of this test process, as those of a run are of its own."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.worker_template import WorkerTemplate

FOLDERS = [str(Path(__file__).parent / name) for name in ("", "ray_cpu", "end_to_end", "oracle")]
"""Where workers find the modules of the tests."""


class SharedTemplate(WorkerTemplate):
    """A template that outlives the runs that use it. It ends with this process, or when the
    environment of the next run is another one."""

    def close(self) -> None:
        pass


_running: dict[tuple[str | None, ...], SharedTemplate] = {}
"""The template that runs, by what of the environment it has seen."""


def shared_template() -> WorkerTemplate:
    """The template of this process, which has imported what workers need.

    It looks for modules and temporary files where the environment said when it started, and what is
    measured in its forks (scripts/mutant_runs.py) counts for the test of that time.
    """
    seen = tuple(os.environ.get(name) for name in ("PYTHONPATH", "TMPDIR", "COVERED_TEST"))
    if seen not in _running:
        for template in _running.values():
            WorkerTemplate.close(template)
        _running.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [seen[0], *FOLDERS])))
            template = worker_template.start(WORKERS)
        _running[seen] = SharedTemplate(template.process, template.folder, template.mark)
    return _running[seen]


def start_ray(env_vars: Mapping[str, str] | None = None, **options: Any) -> None:
    """Starts a Ray whose workers are forks of the template."""
    # Ray would start a worker for each CPU at once.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={
            "py_executable": shared_template().command,
            "env_vars": {"PYTHONPATH": os.pathsep.join(FOLDERS), **(env_vars or {})},
        },
        **options,
    )
