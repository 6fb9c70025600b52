"""What holds for every unit test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from reward_processes import REWARD_FILE


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Workers that run in the test's own process join a group of one, which the next file must not
    find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "my_reward.py"
    file.write_text(REWARD_FILE)
    return str(file)
