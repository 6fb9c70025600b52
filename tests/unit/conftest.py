"""What holds for every unit test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Workers that run in the test's own process join a group of one, which the next file must not find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
