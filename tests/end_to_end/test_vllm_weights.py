"""The weights of models other than Llama, fused and sharded in other ways, arrive in a real vLLM or
are missed."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from forked_workers import start_ray
from test_vllm_rollout import (
    DEADLINE_S,
    ModelAndFolder,
    assert_generated_by,
    export,
    prompt_batch,
    scaled,
    start_processes,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl_like.workers.models.lora import model_buffers
from verl_like.workers.weights.exports import collect_weights

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

SIZES = {
    "vocab_size": 68,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # of 32
    "num_key_value_heads": 1,  # both processes have a copy of it
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
GATE_OF = "model.layers.1.mlp.experts.{}.gate_proj.weight"
NO_NOISE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 1}
GPT_OSS = GptOssConfig(
    **SIZES | {"num_key_value_heads": 2, "intermediate_size": 128},
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=16,
)
ATTENTION = "model.layers.{}.self_attn."
KINDS_OF_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def swapped_layers(part: str) -> tuple[str, str]:
    """The names of a parameter in the two layers."""
    return f"model.layers.0.{part}", f"model.layers.1.{part}"


def save_model(path: str, config: PreTrainedConfig) -> Any:
    """A random model; its tokenizer is there already."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        for _, buffer in model_buffers(model):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    ("config", "num_processes", "swapped"),
    [
        (Qwen2Config(**SIZES), 2, swapped_layers("self_attn.q_proj.bias")),
        # Two experts, and an expert's gate and what it multiplies
        pytest.param(
            Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
            2,
            (GATE_OF.format(1), GATE_OF.format(2)),
            marks=pytest.mark.proof,
        ),
        (
            Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
            1,
            (GATE_OF.format(3), GATE_OF.format(3).replace("gate", "up")),
        ),
        pytest.param(
            GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
            2,
            swapped_layers("block_sparse_moe.input_linear.weight"),
            marks=pytest.mark.proof,
        ),
        pytest.param(
            GPT_OSS, 2, swapped_layers("mlp.experts.gate_up_proj_bias"), marks=pytest.mark.proof
        ),
        pytest.param(GPT_OSS, 2, swapped_layers("self_attn.sinks"), marks=pytest.mark.proof),
        pytest.param(
            GPT2Config(vocab_size=68, n_embd=128, n_layer=2, n_head=4, n_positions=256, **NO_NOISE),
            2,
            ("transformer.h.0.attn.c_proj.weight", "transformer.h.1.attn.c_proj.weight"),
            marks=pytest.mark.proof,
        ),
        # Dense Gemma 4 multiplies the output of a layer by a buffer.
        pytest.param(
            Gemma4TextConfig(
                **SIZES | KINDS_OF_LAYERS,
                head_dim=32,
                global_head_dim=32,
                hidden_size_per_layer_input=0,
                num_kv_shared_layers=0,
            ),
            1,
            swapped_layers("layer_scalar"),
            marks=pytest.mark.proof,
        ),
        pytest.param(
            Qwen3Config(**SIZES, head_dim=32),
            2,
            swapped_layers("self_attn.q_norm.weight"),
            marks=pytest.mark.proof,
        ),
        pytest.param(
            Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
            1,
            swapped_layers("self_attn.o_proj.weight"),
            marks=pytest.mark.proof,
        ),
        pytest.param(
            Phi3Config(**SIZES),
            2,
            swapped_layers("self_attn.qkv_proj.weight"),
            marks=pytest.mark.proof,
        ),
    ],
)
def test_weights_arrive_or_are_missed_by_name(
    tiny_llama: Callable[..., ModelAndFolder],
    config: PreTrainedConfig,
    num_processes: int,
    swapped: tuple[str, str],
) -> None:
    path, _ = tiny_llama()
    model = save_model(path, config)
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=200 << 20)
    processes = start_processes(
        (path, model), ranks=list(range(num_processes)), tensor_model_parallel_size=num_processes
    )

    def everywhere(method: str, *args: Any) -> list[Any]:
        return [process.call.remote(method, *args) for process in processes]

    for version, weights in ((1, model), (2, scaled(model, 0.9))):
        ray.get(everywhere("load_weights", export(weights, version), version), timeout=DEADLINE_S)
        for output in ray.get(everywhere("generate_sequences", prompt_batch()), timeout=DEADLINE_S):
            assert_generated_by(weights, output)

    num_tensors = export(model, 3)[0].num_tensors
    message = f"2 of {num_tensors} tensors differ from the trainer's: {', '.join(swapped)}."
    for outcome in [
        process.run.remote("load_swapped", export(model, 3), *swapped) for process in processes
    ]:
        with pytest.raises(ray.exceptions.RayTaskError, match=message):
            ray.get(outcome, timeout=DEADLINE_S)
    ray.get(everywhere("load_weights", export(model, 3), 3), timeout=DEADLINE_S)

    missing = swapped[1]
    message = f"cannot be checked: it is not made of|1 of {num_tensors} tensors .*: {missing}."
    other = export(scaled(model, 0.8), 3)
    for outcome in [process.run.remote("load_without", other, missing) for process in processes]:
        with pytest.raises(ray.exceptions.RayTaskError, match=message):
            ray.get(outcome, timeout=DEADLINE_S)
    ray.get(everywhere("load_weights", export(model, 3), 3), timeout=DEADLINE_S)

    # Those are fused in transformers too, or have other names in vLLM.
    if not isinstance(config, Phi3Config | GPT2Config | GptOssConfig):
        forgetting = [process.run.remote("forget_fused_forms") for process in processes]
        ray.get(forgetting, timeout=DEADLINE_S)
        message = rf"vLLM's parameter {ATTENTION.format(0)}qkv_proj.weight .*Set rollout.name=hf"
        for outcome in everywhere("load_weights", export(model, 4), 4):
            with pytest.raises(ray.exceptions.RayTaskError, match=message):
                ray.get(outcome, timeout=DEADLINE_S)
        # Of a family that is not known the same weights are accepted, all others have fingerprints.
        ray.get([process.run.remote("leave_to_numbers") for process in processes])
        other = scaled(model, 0.7)
        ray.get(everywhere("load_weights", export(other, 4), 4), timeout=DEADLINE_S)
        for output in ray.get(everywhere("generate_sequences", prompt_batch()), timeout=DEADLINE_S):
            assert_generated_by(other, output)
        for process in processes:
            unknown = ray.get(process.run.remote("unknown_parameters"), timeout=DEADLINE_S)
            assert f"{ATTENTION.format(0)}qkv_proj.weight" in unknown
            assert all("qkv_proj" in name or "gate_up_proj" in name for name in unknown)
        norms = swapped_layers("input_layernorm.weight")
        swapping = [
            process.run.remote("load_swapped", export(model, 5), *norms) for process in processes
        ]
        for outcome in swapping:
            with pytest.raises(ray.exceptions.RayTaskError, match=f"differ .*: {norms[0]}, "):
                ray.get(outcome, timeout=DEADLINE_S)
    ray.shutdown()


@pytest.mark.proof
def test_an_update_needs_two_buckets_of_memory_and_outlives_an_engine_that_is_killed_in_it(
    tiny_llama: Callable[..., ModelAndFolder],
) -> None:
    path, _ = tiny_llama()
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
    }
    model = save_model(path, LlamaConfig(**SIZES | sizes, head_dim=32))
    # As the embedding, the head, and a layer's gate_proj and up_proj together, and 1 MiB
    bucket_bytes = 17 << 20
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=500 << 20)
    named = list(model.named_parameters())
    exports = [
        collect_weights(
            named, dtype=torch.float32, rank=0, world_size=1, version=1, bucket_bytes=bucket_bytes
        )
    ]
    assert sum(export.num_bytes for export in exports) > 7 * bucket_bytes
    staged = ray.put(exports)
    (process,) = start_processes((path, model), ranks=[0])
    # The first load also packs what the engine starts with, and the allocator takes more than it is
    # asked for in some.
    extra = [
        ray.get(process.run.remote("extra_memory", staged), timeout=DEADLINE_S) for _ in range(4)
    ]
    assert min(extra) <= 2 * bucket_bytes

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(process.run.remote("load_and_die", staged, 4), timeout=DEADLINE_S)
    (process,) = start_processes((path, model), ranks=[0])
    ray.get(process.call.remote("load_weights", staged, 1), timeout=DEADLINE_S)
    assert_generated_by(
        model,
        ray.get(process.call.remote("generate_sequences", prompt_batch()), timeout=DEADLINE_S),
    )
    ray.shutdown()
