"""FLOPs of a forward pass against torch's own counter, and by hand."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl_like.workers.config.models import ModelConfig
from verl_like.workers.models.pretrained import load_hf_config
from verl_like.workers.planning.flops import ModelCost

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def counted(config, length):
    """What torch counts: its attention computes all length x length pairs, half of which causality
    hides."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None], use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        LlamaConfig(**TINY, tie_word_embeddings=True),
        Qwen3Config(**TINY, head_dim=16),
    ],
    ids=["llama", "tied", "qwen3"],
)
def test_flops_of_dense_models_are_those_that_torch_counts(config):
    cost = ModelCost.of(config)
    ((per_pair, window),) = cost.per_pair
    assert window is None
    for length in (5, 11):
        rest = counted(config, length) - per_pair * length**2
        assert rest == (cost.per_token + cost.per_scored_token) * length


def test_a_token_pays_for_the_experts_it_is_routed_to():
    sizes = {
        **TINY,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    attention = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
    experts = 2 * 3 * 32 * 16 + 6 * 32  # two of gate, up and down, and the router
    assert ModelCost.of(Qwen3MoeConfig(**sizes)).per_token == 2 * 3 * (attention + experts)


def test_attention_counts_each_token_with_those_before_within_the_window():
    cost = ModelCost(per_token=10.0, per_scored_token=100.0, per_pair=((1.0, None), (1000.0, 2)))
    # Pairs of 4 tokens: 1 + 2 + 3 + 4 = 10, within a window of 2: 1 + 2 + 2 + 2 = 7.
    flops_B = cost.forward(lengths_B=torch.tensor([4, 1]), num_scored_B=torch.tensor([3, 0]))
    assert flops_B.tolist() == [40 + 300 + 10 + 7000, 10 + 1 + 1000]


def test_sliding_layers_are_read_from_the_configuration():
    pair = 4.0 * 4 * 8
    gemma = Gemma2Config(**TINY, head_dim=8, sliding_window=7)
    assert {window: flops for flops, window in ModelCost.of(gemma).per_pair} == {
        7: 2 * pair,
        None: pair,
    }
    mistral = MistralConfig(**TINY, head_dim=8, sliding_window=5)
    assert ModelCost.of(mistral).per_pair == ((3 * pair, 5),)


def test_heads_whose_size_differs_between_layers_are_counted_layer_by_layer():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {**TINY, "vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8}
    config = Gemma4TextConfig(
        **sizes, layer_types=kinds, sliding_window=7, head_dim=8, global_head_dim=16
    )
    assert ModelCost.of(config).per_pair == ((2 * 4.0 * 4 * 8, 7), (4.0 * 4 * 16, None))


def test_of_a_model_that_also_sees_images_the_language_model_counts():
    sizes = {**TINY, "head_dim": 8, "sliding_window": 7}
    assert ModelCost.of(Gemma3Config(text_config=sizes)) == ModelCost.of(Gemma3TextConfig(**sizes))


def test_a_model_with_code_of_its_own_is_counted_where_that_code_may_run(tmp_path):
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = "
        "'own_llama'\n"
    )
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import "
        "OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "model_type": "own_llama", "auto_map": classes})
    )
    config = load_hf_config(ModelConfig(path=str(tmp_path), trust_remote_code=True), key="m")
    assert ModelCost.of(config) == ModelCost.of(LlamaConfig(**TINY))
