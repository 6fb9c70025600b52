"""On one machine the processes of runs listen at loopback addresses alone, and the page lists who
does. `test_ppo_run` has the run that `make test` looks at."""

from collections.abc import Callable
from pathlib import Path

import pytest
from listening import Listeners, assert_loopback
from runs import GRPO, SPLIT, run_apart, run_on_ray, tiny_run_settings

pytestmark = pytest.mark.ray


@pytest.mark.proof
def test_a_detached_run_of_two_trainers_listens_at_loopback_addresses_alone(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, "detached.num_trainers=2"]
    listeners = Listeners()
    listeners.start()
    assert run_apart([*settings, "actor_rollout_ref.rollout.weight_transport=gloo"]) == 0
    found = listeners.end()
    assert_loopback(found)
    assert "the run's own process" in {kind for kind, _ in found}, "where the trainers meet"


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.parametrize(
    "settings",
    [["tensor_model_parallel_size=2"], ["name=vllm_async", "weight_transport=shared_memory"]],
)
def test_vllm_listens_at_loopback_addresses_alone(
    settings: list[str], tmp_path: Path, tiny_llama: Callable
):
    own = [
        *tiny_run_settings(tmp_path, tiny_llama, engine="vllm"),
        *SPLIT,
        "trainer.val_before_train=false",
    ]
    listeners = Listeners()
    listeners.start()
    run_on_ray(
        [*own, "trainer.test_freq=-1", *(f"actor_rollout_ref.rollout.{each}" for each in settings)]
    )
    assert_loopback(listeners.end())
