"""One Ray for each test file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=2,  # counted, not used
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        # For toy_workers
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(map(str, Path(__file__).parents[:2]))}},
    )
    with pytest.MonkeyPatch.context() as patch:
        # Of several ranks that fail, the caller reads one; Ray would print the others among the
        # results.
        patch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        yield
    ray.shutdown()
