"""Runs of models with adapters: the policy's, whose reference is the frozen model under it, and the
critic's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import APART, metrics_of, run_apart, run_on_ray, tiny_run_settings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.ray

ADAPTERS = [
    "actor_rollout_ref.model.lora_rank=4",
    "critic.model.lora_rank=2",
    "critic.model.target_modules=[v_proj]",
]
PPO = [*ADAPTERS, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.2"]


def steps_of(folder: Path) -> list[dict]:
    return [row for row in metrics_of(folder) if "actor/loss" in row]


@pytest.mark.proof
def test_makers_that_get_only_adapters_have_the_numbers_of_the_synchronous_run(
    tmp_path: Path, tiny_llama: Callable
):
    folders = [tmp_path / name for name in ("synchronous", "detached")]
    for folder, run in zip(folders, (run_on_ray, run_apart), strict=True):
        folder.mkdir()
        run([*tiny_run_settings(folder, tiny_llama), *APART, *PPO])
    names = (
        "actor/loss",
        "critic/loss",
        "critic/values/mean",
        "actor/reward_kl_penalty",
        "actor/grad_norm",
    )
    one, other = (
        [{name: row[name] for name in names} for row in steps_of(folder)] for folder in folders
    )
    assert len(one) == 2 and one == other
    # B is zero at first
    assert one[0]["actor/reward_kl_penalty"] == 0 != one[1]["actor/reward_kl_penalty"]
    for role in ("actor", "critic"):
        written = [
            load_file(f / f"runs/latest/global_step_2/{role}/huggingface/model.safetensors")
            for f in folders
        ]
        assert all((written[0][name] == value).all() for name, value in written[1].items())


@pytest.mark.proof
@pytest.mark.vllm
def test_adapters_reach_vllm_and_the_merged_model_is_exported(tmp_path: Path, tiny_llama: Callable):
    settings = tiny_run_settings(tmp_path, tiny_llama, engine="vllm")
    run_on_ray(
        [*settings, *PPO, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.dtype=float32"]
    )
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps_of(tmp_path))
    calls = [json.loads(line) for line in (tmp_path / "runs/latest/timeline.jsonl").open()]
    assert {call["role"] for call in calls if call["method"] == "compute_ref_log_prob"} == {"actor"}
    actor = tmp_path / "runs/latest/global_step_2/actor"
    model, base = load_file(actor / "huggingface/model.safetensors"), settings[3].partition("=")[2]
    frozen = AutoModelForCausalLM.from_pretrained(base).state_dict()
    changed = {name for name, value in model.items() if (value != frozen[name]).any()}
    assert changed == {name for name in model if "_proj." in name}
    size = sum(file.stat().st_size for file in (actor / "checkpoint").glob("*.safetensors"))
    assert size < (actor / "huggingface/model.safetensors").stat().st_size
