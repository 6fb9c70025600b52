"""One Ray for each test file."""

from collections.abc import Iterator

import pytest
import ray
from forked_workers import start_ray


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    start_ray(num_cpus=8, num_gpus=2)  # counted, not used
    with pytest.MonkeyPatch.context() as patch:
        # Of several ranks that fail, the caller reads one; Ray would print the others among the
        # results.
        patch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        yield
    ray.shutdown()
