"""Adapters in a real vLLM, which gets nothing else; transformers with the adapter merged by peft is
the reference."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import rollout_requests
import torch
from forked_workers import start_ray
from peft import LoraConfig, get_peft_model
from rollout_requests import assert_drawn_by, make_requests
from test_vllm_requests import PROMPTS, in_engine
from test_vllm_rollout import DEADLINE_S, call, start_processes
from tiny_experts import CONFIGS, write_experts
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.models.lora import trained_parameters, with_scale
from verl_like.workers.weights.exports import WeightExport, collect_weights
from verl_like.workers.weights.shared_memory import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

# Of the fused layers one has all parts, and one has a part without an adapter.
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 3, 5
ADAPTER = {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
NUM_TENSORS = 2 * 2 * len(TARGETS)
TRANSPORT = SharedMemoryTransport()
SETTINGS: dict[str, dict[str, Any]] = {
    "keep": {"kv_after_update": "keep"},
    "recompute": {},
    "another process": {"name": "vllm_async", "weight_transport": "shared_memory"},
}


@pytest.fixture(scope="module")
def path(tiny_llama: Callable[..., tuple[str, LlamaForCausalLM]]) -> str:
    return tiny_llama(tie=True)[0]


@pytest.fixture(scope="module")
def engine(path: str) -> Iterator[Callable[[str], Any]]:
    """Starts the engine of a name in `SETTINGS` at its first use."""
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=200 << 20)
    yield functools.cache(
        lambda name: start_processes((path, None), ranks=[0], adapter=ADAPTER, **SETTINGS[name])[0]  # type: ignore
    )
    ray.shutdown()


def policy(
    path: str, version: int, targets: list[str] = TARGETS, num_layers: int = 2
) -> tuple[list[WeightExport], LlamaForCausalLM]:
    """A random adapter, as the actor exports it, and the model that it is merged into."""
    torch.manual_seed(version)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
    model = (
        get_peft_model(AutoModelForCausalLM.from_pretrained(path), settings)
        .eval()
        .requires_grad_(False)
    )
    named = [
        (name.removeprefix("base_model.model."), value.normal_(std=0.2))
        for name, value in trained_parameters(model)
    ]
    export = collect_weights(
        with_scale(named, TrainedModelConfig(path=path, **ADAPTER)),
        dtype=torch.float32,
        rank=0,
        world_size=1,
        version=version,
        allocate=TRANSPORT.allocate,
    )
    assert export.num_tensors == 2 * num_layers * len(targets)
    return [TRANSPORT.publish(export)], model.merge_and_unload()


@pytest.mark.parametrize("kv", ["recompute", pytest.param("keep", marks=pytest.mark.proof)])
def test_responses_go_on_with_a_new_adapter_and_find_nothing_of_the_one_before(
    engine: Callable[[str], Any], path: str, kv: str
) -> None:
    requests, models = {request.name: request for request in make_requests(PROMPTS)}, {}
    exports, models[3] = policy(path, 3)
    call(engine(kv), "load_weights", exports, 3)
    for version in (4, 5):
        exports, models[version] = policy(path, version)
        early, queued, late = [[requests[name] for name in names] for names in ("abf", "d", "ce")]
        completions = in_engine(
            engine(kv), rollout_requests.run_with_update, early, queued, late, exports, 2
        )
        for name, completion in completions.items():
            versions = [version - 1, version] if name in "abf" else [version]
            assert [each for each, _, _ in completion.versions] == versions
            assert_drawn_by(models, requests[name], completion, kv=kv)


@pytest.mark.proof
def test_an_engine_in_another_process_computes_with_the_adapter_it_was_sent(
    engine: Callable[[str], Any], path: str
) -> None:
    requests = make_requests(PROMPTS)
    for version in (3, 4):
        exports, model = policy(path, version)
        call(engine("another process"), "load_weights", exports, version)
        completions = in_engine(engine("another process"), rollout_requests.run, requests)
        for request in requests:
            assert_drawn_by({version: model}, request, completions[request.name], kv="recompute")


def test_an_adapter_that_is_stale_or_has_two_tensors_exchanged_does_not_serve(
    engine: Callable[[str], Any], path: str
) -> None:
    process, (exports, model) = engine("recompute"), policy(path, 8)
    call(process, "load_weights", policy(path, 7)[0], 7)
    stale = process.call_without_loading.remote("load_weights", exports, 8)
    with pytest.raises(
        ray.exceptions.RayTaskError, match=f"{NUM_TENSORS} of {NUM_TENSORS} tensors differ from the"
    ):
        ray.get(stale, timeout=DEADLINE_S)
    first, second = (
        f"model.layers.1.mlp.{part}_proj.lora_B.default.weight" for part in ("gate", "up")
    )
    with pytest.raises(
        ray.exceptions.RayTaskError, match=f"2 of {NUM_TENSORS} tensors differ.*: {first}, {second}"
    ):
        ray.get(process.run.remote("load_swapped", exports, first, second), timeout=DEADLINE_S)
    (request,) = make_requests({"a": PROMPTS["a"]})
    with pytest.raises(ray.exceptions.RayTaskError, match="no verified weights"):
        in_engine(process, rollout_requests.run, [request])
    call(process, "load_weights", exports, 8)
    assert_drawn_by(
        {8: model},
        request,
        in_engine(process, rollout_requests.run, [request])["a"],
        kv="recompute",
    )


def test_every_request_has_the_adapter_for_vllm_computes_one_without_it_wrongly_beside_them(
    engine: Callable[[str], Any], path: str
) -> None:
    exports, _ = policy(path, 20)
    call(engine("recompute"), "load_weights", exports, 20)
    (request,) = make_requests({"a": PROMPTS["a"]})
    adapters, beside, alone = in_engine(
        engine("recompute"), rollout_requests.run_beside_one_without_adapter, request
    )
    assert adapters == {"policy-v20"}
    tokens, log_probs = alone
    model = AutoModelForCausalLM.from_pretrained(path)
    completion = rollout_requests.Completion(tokens, log_probs, ((0, 0, len(tokens)),))
    assert_drawn_by({0: model}, request, completion, kv="recompute")
    assert beside != alone  # once they are the same, requests of both kinds could share a batch


@pytest.mark.proof
def test_a_mixture_of_experts_computes_with_the_adapter_of_its_attention(
    engine: Callable[[str], Any], tmp_path: Path
) -> None:
    """And with the experts of the frozen model, of which vLLM would take another kernel."""
    path = write_experts(tmp_path, "qwen3_moe")
    adapter = ADAPTER | {"target_modules": "all-linear"}
    (process,) = start_processes((path, None), ranks=[0], adapter=adapter)  # type: ignore
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    vocabulary = CONFIGS["qwen3_moe"].vocab_size
    prompts = {name: [token % vocabulary for token in each] for name, each in PROMPTS.items()}
    requests = make_requests(prompts)
    for version in (3, 4):
        exports, model = policy(path, version, attention, num_layers=3)
        call(process, "load_weights", exports, version)
        completions = in_engine(process, rollout_requests.run, requests)
        for request in requests:
            assert_drawn_by({version: model}, request, completions[request.name], kv="recompute")
