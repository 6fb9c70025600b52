"""Whether a step fits into the object store, and models that the driver fetches, without Ray."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import ray

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo import object_store
from verl_like.trainer.ppo.object_store import check_object_store, step_bytes
from verl_like.workers.config.models import ModelConfig
from verl_like.workers.models.pretrained import fetch_weights

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets the free memory and the free part of /dev/shm, in GiB."""

    def make(memory: float, shared: float) -> None:
        monkeypatch.setattr(object_store, "estimate_available_memory", lambda: int(memory * GIB))
        for module in (object_store, ray._private.utils):
            monkeypatch.setattr(module, "get_shared_memory_bytes", lambda: int(shared * GIB))

    return make


def test_a_small_shm_is_a_warning_as_long_as_a_step_fits_on_disk(machine):
    machine(memory=10, shared=8)  # Ray takes 30% of the memory
    assert check_object_store({"rows": 3 * GIB - 1000}) is None
    machine(memory=10, shared=1 / 16)
    warning = check_object_store({"rows": 2 * GIB, "weights": GIB // 2})
    assert (
        "/dev/shm has only 0.06 GiB" in warning
        and "at most 2.50 GiB" in warning
        and "--shm-size=3.30g" in warning
    )


@pytest.mark.parametrize("shared", [8, 1 / 16])
def test_a_step_that_cannot_fit_is_refused_with_the_sum(machine, shared):
    machine(memory=10, shared=shared)
    with pytest.raises(ValueError, match="does not fit into Ray's object store") as caught:
        check_object_store({"rows": 2 * GIB, "weights": 3 * GIB // 2})
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["rows", "2.00", "GiB"] in lines and ["weights", "1.50", "GiB"] in lines
    assert ["together", "3.50", "GiB"] in lines and lines[-2][-2:] == ["3.00", "GiB"]


def config_of(path: str, *settings: str) -> PPOConfig:
    return load_ppo_config(
        [
            "device=cpu",
            "data.train_files=a",
            "data.val_files=a",
            f"actor_rollout_ref.model.path={path}",
            "data.max_prompt_length=8",
            "data.max_response_length=4",
            "data.train_batch_size=6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=6",
            "critic.ppo_micro_batch_size_per_gpu=9",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=9",
            "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            f"reward_model.model.path={path}",
            *settings,
        ]
    )


TWO_MORE = [f"reward_models.{name}.path=x" for name in "ab"] + [
    f"role_mapping.{name}=global_pool" for name in "ab"
]


@pytest.mark.parametrize(
    ("settings", "floats"),
    [
        # rollout_log_probs, rule_scores, the two of the driver, advantages, returns
        (["algorithm.adv_estimator=grpo"], 6),
        ([], 7),  # and values
        (["algorithm.use_kl_in_reward=true", "reward_model.enable=true"], 11),
        (["algorithm.use_kl_in_reward=true", "reward_model.enable=true", *TWO_MORE], 13),
        # 6, and old_log_probs, entropys, sum_pi_squared
        (["algorithm.adv_estimator=optimal_token_baseline"], 9),
    ],
)
def test_the_bytes_of_a_step_are_those_of_its_columns_and_weights(tiny_llama, settings, floats):
    path, model = tiny_llama()
    config = config_of(path, *settings)
    # 1 int64 of P = 8, 2 of R = 4, 2 of a row; float32 of R and 1 of a row; 2 booleans of a row.
    row = 8 * (8 + 2 * 4 + 2) + 4 * (floats * 4 + 1) + 2
    rows, weights = step_bytes(config).values()
    assert rows == 2 * 18 * row
    assert weights == 2 * sum(parameter.numel() for parameter in model.parameters())


def test_weights_count_where_they_go_through_the_store_and_of_a_model_with_an_adapter_that_alone(
    tiny_llama,
):
    path, model = tiny_llama()
    rank, keys = (
        4,
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj]"],
    )
    _, adapter = step_bytes(config_of(path, *keys)).values()
    of_layer = model.config.hidden_size + model.config.num_attention_heads * model.config.head_dim
    assert adapter == 2 * rank * of_layer * model.config.num_hidden_layers
    assert (
        len(step_bytes(config_of(path, "actor_rollout_ref.rollout.weight_transport=shared_memory")))
        == 1
    )


def test_a_model_of_the_hub_is_whole_on_this_machine_before_a_run_starts(
    tmp_path: Path, tiny_llama, monkeypatch
):
    path, _ = tiny_llama()
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(path, cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub_model = ModelConfig(path="someone/tiny")
    fetch_weights(hub_model, key="critic.model")
    fetch_weights(ModelConfig(path=path), key="critic.model")
    os.truncate(cached / "snapshots/abc/model.safetensors", 1000)
    with pytest.raises(
        ValueError,
        match=r"critic.model.path=someone/tiny: .*abc/model.safetensors is damaged \(Error",
    ):
        fetch_weights(hub_model, key="critic.model")
    (cached / "snapshots/abc/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"critic.model.path=someone/tiny: .*abc has no weights"):
        fetch_weights(hub_model, key="critic.model")
    with pytest.raises(ValueError, match=r"critic.model.path=someone/else cannot be downloaded"):
        fetch_weights(ModelConfig(path="someone/else"), key="critic.model")
