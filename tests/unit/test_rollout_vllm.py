"""What of the vLLM engine needs no vLLM; the engine itself is tested in tests/end_to_end."""

import os
from types import SimpleNamespace

import pytest
import torch

from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout.vllm_engine import VllmEngine, require_room

GB = 10**9


def test_an_engine_that_cannot_wake_up_says_what_lacks():
    require_room(free=32 * GB, total=80 * GB, needed=32 * GB)
    message = (
        r"needs the 32\.0 GB .* only 24\.0 of the device's 80\.0 GB are free.*hold 56\.0 "
        r"GB.* at least 0\.10"
    )
    with pytest.raises(ValueError, match=message):
        require_room(free=24 * GB, total=80 * GB, needed=32 * GB)


def test_what_torch_has_cached_is_not_what_the_engine_needs_to_wake_up(
    monkeypatch: pytest.MonkeyPatch,
):
    device = SimpleNamespace(free=10 * GB, cached=3 * GB, engine=32 * GB)

    def empty_cache() -> None:
        device.free, device.cached = device.free + device.cached, 0

    def sleep(level: int) -> None:
        empty_cache()  # as vLLM's allocator does
        device.free, device.engine = device.free + device.engine, 0

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, 80 * GB))
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    engine = object.__new__(VllmEngine)
    engine.config, engine.model_config = (
        SimpleNamespace(free_cache_engine=True),
        SimpleNamespace(lora_rank=0),
    )
    engine.device, engine.llm = "cuda", SimpleNamespace(sleep=sleep)
    engine._sleep()
    assert engine._given_back == 32 * GB


def test_sums_over_a_replicas_ranks_have_an_order_unless_the_user_asks_for_another(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    engine = object.__new__(VllmEngine)
    engine.device = "cpu"
    engine.config = RolloutConfig.model_construct(enforce_eager=None)
    for name in ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
        os.environ.pop(name, None)
        engine._prepare_import()
        assert os.environ[name] == "0"
        os.environ[name] = "1"
        engine._prepare_import()
        assert os.environ[name] == "1"
