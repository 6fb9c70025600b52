"""A checkpoint on the way becomes a model that programs outside of the run load."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_local_step import run_locally
from test_toy_job import assert_vllm_generates
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_like.export import export

pytestmark = [pytest.mark.vllm, pytest.mark.proof]


def test_both_models_of_a_checkpoint_on_the_way_load_in_transformers_and_the_policy_in_vllm(
    tmp_path: Path, tiny_llama: Callable
):
    run_locally(
        tmp_path, tiny_llama, "trainer.save_freq=1", "trainer.val_before_train=false", steps=2
    )
    run = tmp_path / "runs/latest"
    for role in ("actor", "critic"):
        export(run / f"global_step_1/{role}", tmp_path / role)
        export(run / f"global_step_2/{role}", tmp_path / f"last_{role}")
        names = {path.name for path in (run / f"global_step_2/{role}/huggingface").iterdir()}
        for name in names:
            written = run / f"global_step_2/{role}/huggingface" / name
            assert (tmp_path / f"last_{role}" / name).read_bytes() == written.read_bytes()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "actor")("1+2=", return_tensors="pt")
    assert policy(**inputs).logits.isfinite().all() and critic(**inputs).logits.shape == (1, 4, 1)
    first, last = (
        load_file(tmp_path / f"{name}/model.safetensors") for name in ("actor", "last_actor")
    )
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert_vllm_generates(tmp_path / "actor")
