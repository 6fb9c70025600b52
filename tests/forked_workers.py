"""Ray's workers as forks of one template of this test process, as those of a run are of its own."""

import functools
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


TEMPLATES: list[int] = []
"""The process id of each template."""


class SharedTemplate(WorkerTemplate):
    """A template that outlives the runs that use it and ends with this process."""

    def close(self) -> None:
        pass


def shared_template() -> WorkerTemplate:
    """The template of this process, which has imported what workers need.

    One that starts now would look for modules and temporary files where the environment says. There
    is another template for each such environment.
    """
    return _template(os.environ.get("PYTHONPATH", ""), os.environ.get("TMPDIR", ""))


@functools.cache
def _template(python_path: str, _temporary: str) -> WorkerTemplate:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [python_path, *FOLDERS])))
        template = worker_template.start(WORKERS)
    TEMPLATES.append(template.process.pid)
    return SharedTemplate(template.process, template.folder, template.mark)


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
