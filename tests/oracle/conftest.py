"""The world of the training steps, and what the reference computes in it."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import step_reference
import step_runs
import step_table
import torch.distributed as dist


@pytest.fixture(scope="session")
def world_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    step_runs.write_world(folder)
    return folder


@pytest.fixture(scope="session")
def expected(world_folder: Path) -> Callable[[str], step_reference.Trained]:
    """What two training steps of a run are by the reference."""

    @cache
    def of_run(run: str) -> step_reference.Trained:
        return step_reference.train(
            step_runs.defaults() | step_table.settings_of(run, world_folder), steps=2
        )

    return of_run


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Workers that run in the test's own process join a group of one, which the next file must not
    find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
