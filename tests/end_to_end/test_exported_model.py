"""A checkpoint on the way becomes a model that programs outside of the run load."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_local_step import run_locally
from test_toy_job import VLLM_SETTINGS, assert_vllm_generates
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_like.export import export

SERVED_ADAPTER = """
import json, sys, vllm
from vllm.lora.request import LoRARequest

engine = vllm.LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=32,
                  max_num_seqs=1, enable_lora=True, max_lora_rank=8)
drawn = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=5)
adapter = LoRARequest("exported", 1, sys.argv[2])
(output,) = engine.generate("1+2=", drawn, lora_request=adapter)
first = output.outputs[0].logprobs[0]
print(json.dumps({str(token): each.logprob for token, each in first.items()}))
"""
"""Prints the log-probabilities of the five likeliest tokens, with the adapter at `sys.argv[2]`."""

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


def test_vllm_computes_with_an_exported_adapter_as_the_merged_model_does(
    tmp_path: Path, tiny_llama: Callable
):
    settings = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=12"]
    settings += ["actor_rollout_ref.actor.optim.lr=0.05", "trainer.save_freq=1"]
    run_locally(tmp_path, tiny_llama, *settings, "trainer.val_before_train=false", steps=1)
    actor = tmp_path / "runs/latest/global_step_1/actor"
    export(actor, tmp_path / "merged", "float32")
    export(actor, tmp_path / "adapter", "float32", adapter_only=True)
    base = json.loads((tmp_path / "adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    done = subprocess.run(
        [sys.executable, "-c", SERVED_ADAPTER, base, str(tmp_path / "adapter")],
        env=os.environ | VLLM_SETTINGS,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    served = json.loads(done.stdout.strip().splitlines()[-1])
    inputs = AutoTokenizer.from_pretrained(tmp_path / "adapter")("1+2=", return_tensors="pt")
    log_probs = {}
    for path in (tmp_path / "merged", base):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        log_probs[str(path)] = model(**inputs).logits[0, -1].log_softmax(-1)
    of_merged = log_probs[str(tmp_path / "merged")]
    for token, log_prob in served.items():
        assert log_prob == pytest.approx(of_merged[int(token)].item(), abs=1e-3)
    assert (of_merged - log_probs[base]).abs().max() > 0.01
