"""Parts that several test folders share."""

import gc
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def pytest_collection_finish() -> None:
    """Leaves the modules that collecting has imported out of later garbage collections, which took
    a tenth of the time of small tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_llama(
    tmp_path_factory: pytest.TempPathFactory,
) -> "Callable[..., tuple[str, LlamaForCausalLM]]":
    """A function that makes a tiny Llama (see `save_tiny_llama`) and returns its folder and the
    float32 model."""
    # Here, because the process that only deals out the tests needs no torch.
    from tiny_llama_model import save_tiny_llama

    def make(**options: object) -> "tuple[str, LlamaForCausalLM]":
        path = tmp_path_factory.mktemp("tiny_llama")
        return str(path), save_tiny_llama(path, **options)

    return make


@pytest.fixture(scope="session", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A client of HTTP reads all certificates of the machine, which takes 25 ms. No test needs
    them, since no server of a test encrypts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(autouse=True)
def ray_is_left_as_it_was() -> Iterator[None]:
    """Shuts down the Ray that a test started and left, as one that failed does; the next could not
    start its own."""
    ray = sys.modules.get("ray")
    was_initialized = ray is not None and ray.is_initialized()
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and not was_initialized:
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """A folder for what Ray writes, with its note of the last cluster, which all that runs here
    would else share."""
    # A short path: there are sockets in it
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        # Ray would start a worker for each CPU at once.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        yield folder
    shutil.rmtree(folder, ignore_errors=True)
