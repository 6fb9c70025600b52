"""Tiny mixtures of experts, whose heads have a size that vLLM computes on CPU; and a computation
with a given routing, which is written by hand."""

import copy
from pathlib import Path
from typing import Any

import torch
from tiny_worker_models import VOCABULARY, write_tokenizer
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lengths
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS

NUM_EXPERTS = 8
TOP_K = 3
_COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
CONFIGS = {
    "mixtral": MixtralConfig(
        **_COMMON, num_hidden_layers=2, num_local_experts=NUM_EXPERTS, head_dim=32
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_experts=NUM_EXPERTS,
        moe_intermediate_size=16,
        head_dim=32,
        norm_topk_prob=False,
    ),
    "glm4_moe": Glm4MoeConfig(**_COMMON, **_GROUPS, num_hidden_layers=3, head_dim=32),
    "deepseek_v3": DeepseekV3Config(**{**_COMMON, **_GROUPS, **_LATENT}, num_hidden_layers=3),
    "gpt_oss": GptOssConfig(
        # vLLM's kernel on CPU needs multiples of 32.
        **_COMMON | {"intermediate_size": 64},
        num_hidden_layers=3,
        num_local_experts=NUM_EXPERTS,
        head_dim=32,
        sliding_window=3,
    ),
}
"""GLM-4-MoE and DeepSeek-V3 have a layer without experts first, and groups of experts."""
NUM_ROUTERS = {"mixtral": 2, "qwen3_moe": 3, "glm4_moe": 2, "deepseek_v3": 2, "gpt_oss": 3}


def write_experts(path: Path, family: str, initializer_range: float = 0.3) -> str:
    """A randomly initialised model of the family with its tokenizer, whose experts compete."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    config.initializer_range = initializer_range
    hf = AutoModelForCausalLM.from_config(config)
    for name, tensor in [*hf.named_parameters(), *hf.named_buffers()]:
        if name.endswith(("gate.weight", "router.weight", "e_score_correction_bias")):
            torch.nn.init.normal_(tensor, std=0.3)
    hf.save_pretrained(path)
    write_tokenizer(path)
    return str(path)


def drawn_routing(data: DataProto, family: str, seed: int = 1) -> torch.Tensor:
    """A column with experts that are drawn, for each token and layer others."""
    lengths = Rows.of(data).lengths_B
    generator = torch.Generator().manual_seed(seed)
    size = int(lengths.sum()), NUM_ROUTERS[family], NUM_EXPERTS
    ids = torch.rand(size, generator=generator).argsort(-1)[..., :TOP_K]
    return jagged_from_lengths(ids.to(torch.int8), lengths)


def with_routing(data: DataProto, column: torch.Tensor) -> DataProto:
    columns = data.select()
    columns.batch[ROUTED_EXPERTS] = column
    return columns


class RoutedReference:
    """The model of a folder in eager transformers, in float64, with a given routing of each row.

    The weights of experts are those of the papers: softmax, for Mixtral and gpt-oss divided by the
    sum of the selected; sigmoid divided by the sum, times the scaling factor, for GLM-4 and DeepSeek-V3.
    """

    def __init__(self, path: str) -> None:
        self.hf: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", experts_implementation="eager"
        ).double()
        self.family = self.hf.config.model_type
        routers = [each for each in self.hf.modules() if hasattr(each, "top_k")]
        self.routers = [each for each in routers if hasattr(each, "weight")]
        assert len(self.routers) == NUM_ROUTERS[self.family]
        self.ids = torch.zeros(0)
        for number, router in enumerate(self.routers):
            router.forward = self.weights_of(number, router)

    def weights_of(self, number: int, router: torch.nn.Module) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            bias = getattr(router, "bias", None)
            logits = F.linear(hidden.flatten(0, -2), router.weight, bias)
            recorded = self.ids[:, number].long()
            ids = torch.where(recorded < 0, logits.topk(TOP_K, dim=-1).indices, recorded)
            if self.family in ("mixtral", "qwen3_moe", "gpt_oss"):
                weights = logits.softmax(-1).gather(-1, ids)
            else:
                weights = logits.sigmoid().gather(-1, ids)
            if self.family != "qwen3_moe":
                weights = weights / weights.sum(-1, keepdim=True)
            if self.family in ("glm4_moe", "deepseek_v3"):
                weights = weights * 1.5
            return logits, weights, ids

        return forward

    def own_selection(self, data: DataProto, layer: int) -> list[torch.Tensor]:
        """What the router of a layer of Mixtral selects itself in each row, after the layers before
        have computed with the given routing, (tokens, k)."""
        logits: list[torch.Tensor] = []
        hook = self.routers[layer].register_forward_hook(
            lambda router, inputs, outputs: logits.append(outputs[0])
        )
        self.log_probs(data)
        hook.remove()
        return [of_row.topk(TOP_K, dim=-1).indices for of_row in logits]

    def log_probs(self, data: DataProto) -> list[torch.Tensor]:
        """Those of each row's response tokens at temperature 0.7."""
        columns = data.batch
        results = []
        for row in range(len(data)):
            prompt, response = columns["prompts"][row], columns["responses"][row]
            self.ids = columns[ROUTED_EXPERTS][row]
            tokens = torch.cat([prompt, response])[None]
            logits = self.hf(tokens).logits[0, len(prompt) - 1 : -1] / 0.7
            of_tokens = torch.log_softmax(logits, dim=-1).gather(-1, response[:, None])
            results.append(of_tokens[:, 0])
        return results
