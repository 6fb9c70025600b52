"""What of the vLLM engine needs no vLLM; the engine itself is tested in tests/end_to_end."""

import pytest

from verl_like.workers.rollout.vllm_engine import require_room

GB = 10**9


def test_an_engine_that_cannot_wake_up_says_what_lacks():
    require_room(free=32 * GB, total=80 * GB, needed=32 * GB)
    message = r"needs the 32\.0 GB .* only 24\.0 of the device's 80\.0 GB are free.*hold 56\.0 GB.* at least 0\.10"
    with pytest.raises(ValueError, match=message):
        require_room(free=24 * GB, total=80 * GB, needed=32 * GB)
