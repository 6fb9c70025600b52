"""One Ray for each test file."""

import shutil
import tempfile
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
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(map(str, Path(__file__).parents[:2]))}},  # for toy_workers
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """A folder for what Ray writes, with its note of the last cluster, which all that runs here would else share."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a short path: there are sockets in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        yield folder
    shutil.rmtree(folder, ignore_errors=True)
