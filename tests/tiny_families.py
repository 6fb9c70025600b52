"""A tiny configuration of every causal family of transformers, with all kinds of layers that the
family has."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_SIZES = {
    68: ["vocab_size", "vocab_size_per_layer_input"],
    64: [
        "hidden_size",
        "d_model",
        "n_embd",
        "dim",
        "word_embed_proj_dim",
        "embedding_size",
        "attention_hidden_size",
    ],
    96: [
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "ffn_hidden_size",
        "dim_ff",
        "dff",
        "intermediate_size_mlp",
        "dense_intermediate_size",
    ],
    2: [
        "decoder_layers",
        "encoder_layers",
        "num_encoder_layers",
        "num_decoder_layers",
        "num_attention_heads",
        "n_head",
        "n_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
        "num_heads",
        "num_decoder_attention_heads",
        "num_encoder_attention_heads",
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
    ],
    1: [
        "num_key_value_heads",
        "multi_query_group_num",
        "n_group",
        "topk_group",
        "bos_token_id",
        "eos_token_id",
        "first_k_dense_replace",
    ],
    4: ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"],
    32: [
        "head_dim",
        "dim_head",
        "attention_head_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "expert_ffn_hidden_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
    ],
    16: ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "hidden_size_per_layer_input"],
    8: ["sliding_window"],
    256: ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"],
    0: ["pad_token_id"],
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names} | {
    "initializer_range": 0.1
}
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_NOISE = ("dropout", "pdrop", "jitter")
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 32}
_DBRX_ATTENTION = {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0}
_DBRX_EXPERTS = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
_LATENT = {
    # vLLM's CPU kernel has kv_lora_rank + qk_rope_head_dim = 576, as the models have.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "qk_head_dim": 96,
    "v_head_dim": 32,
    "head_dim": 64,
    # vLLM reads these of the models' own files; transformers' classes have no such field.
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bert": {"is_decoder": True},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v3": _LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "dbrx": {"attn_config": _DBRX_ATTENTION, "ffn_config": _DBRX_EXPERTS},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4_moe_lite": _LATENT,
    "glm4_moe": {"head_dim": 32},  # the class has no default, the models have it
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": _ROPE,
    "hunyuan_v1_moe": _ROPE,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": _ROPE,
    "nemotron": {"num_key_value_heads": 1},
    "reformer": {"is_decoder": True},
    "stablelm": {"num_key_value_heads": 1},
    "vaultgemma": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX", "is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """The configuration of a family's language model. Raises what its class raises if it cannot be
    so small."""
    default = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    settings = {
        name: value for name, value in _settings_of(default) if not _is_computed(default, name)
    }
    for canonical, own_name in getattr(default, "attribute_map", {}).items():
        if own_name in settings:
            settings.pop(canonical, None)
    if "kv_lora_rank" in settings:  # latent attention has as many key heads as query heads
        settings["num_key_value_heads"] = 2
        if "head_dim" in settings:
            settings["head_dim"] = settings["qk_rope_head_dim"]
    kinds = {name: list(dict.fromkeys(getattr(default, name, None) or [])) for name in _KINDS}
    num_layers = max(2, *map(len, kinds.values()))
    for name, each in kinds.items():
        if each and not _is_computed(default, name):
            settings[name] = (each * num_layers)[:num_layers]
    for name in _NUM_LAYERS:
        if hasattr(default, name):
            settings[name] = num_layers
    return type(default)(**settings | _OWN.get(default.model_type, {}) | _OWN.get(model_type, {}))


def _settings_of(default: PretrainedConfig) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    values: Mapping[str, Any] = vars(default)
    for name in {*values, *_SIZE_OF, *getattr(default, "attribute_map", {})}:
        value = values.get(name) if name in values else _value_of(default, name)
        if name in _SIZE_OF and value is not None:
            found.append((name, _SIZE_OF[name]))
        elif isinstance(value, float) and any(part in name for part in _NOISE):
            found.append((name, 0.0))
    return found


def _value_of(default: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(default, name, None)
    except (NotImplementedError, ValueError):  # of each layer its own, or none
        return None


def _is_computed(default: PretrainedConfig, name: str) -> bool:
    own_name = getattr(default, "attribute_map", {}).get(name, name)
    return any(
        isinstance(getattr(type(default), each, None), property) for each in (name, own_name)
    )
