"""The floating-point operations of a model's forward pass, for balancing work and for MFU."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

# Legend: B rows. One multiplication and one addition are two FLOPs; only matrix products count.


@dataclass(frozen=True)
class AttentionHeads:
    """The attention heads of one layer."""

    number: int
    key_value_number: int
    size: int


def attention_heads(text_config: PretrainedConfig) -> list[AttentionHeads]:
    """Returns the heads of each layer of a language model, for the FLOPs of attention, and for the
    kernels and the cache of vLLM on a CPU. Layers of Gemma 4 have different heads."""
    heads = []
    for layer in range(text_config.num_hidden_layers):
        config = text_config.per_layer_config[layer]
        number = config.num_attention_heads
        key_value_number = getattr(config, "num_key_value_heads", None) or number
        size = getattr(config, "head_dim", None) or config.hidden_size // number
        of_layer = AttentionHeads(number, key_value_number, size)
        heads.append(of_layer)
    return heads


@dataclass(frozen=True)
class ModelCost:
    """The FLOPs of a causal language model's forward pass.

    A training step costs three times as much, without recomputation.
    """

    per_token: float
    """The FLOPs of the decoder layers' matrices for one token. Of a mixture of experts the experts
    count that a token is routed to."""
    per_scored_token: float
    """The FLOPs of the language-model head for one token, 0 without a head."""
    per_pair: tuple[tuple[float, int | None], ...]
    """The FLOPs of attention for one pair of a query and a key, and the window, of all layers with
    the same sliding window. The window None means all tokens before."""

    @classmethod
    def of(cls, hf_config: PretrainedConfig, *, with_head: bool = True) -> "ModelCost":
        """Counts the matrices of the language model, with its head or without.

        The model is made on the meta device, without memory.
        """
        config = hf_config.get_text_config()
        # Code of the model's own may run, because reading its configuration needed that permission.
        module_of_config = type(config).__module__
        own_code = module_of_config.startswith("transformers_modules.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=own_code)
        head = model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        active_experts = getattr(config, "num_experts_per_tok", 1)
        used: list[float] = []
        for name, parameter in model.named_parameters():
            is_end = parameter is head or parameter is embedding
            # The biases of stacked experts have two dimensions.
            if is_end or parameter.ndim < 2 or name.endswith("bias"):
                continue
            # The experts of a layer are stacked: (experts, out, in).
            used_share = 1.0
            if parameter.ndim == 3:
                used_share = active_experts / len(parameter)
            used.append(parameter.numel() * used_share)
        per_token = 2.0 * sum(used)
        per_scored_token = 0.0
        if with_head:
            per_scored_token = 2.0 * head.numel()
        per_pair = _flops_per_pair(config)
        return cls(per_token, per_scored_token, per_pair)

    def forward(self, lengths_B: Tensor, num_scored_B: Tensor) -> Tensor:
        """Returns the FLOPs of one forward pass over each row, (B,) float64.

        `lengths_B` has the number of its tokens, and `num_scored_B` the number of those that the
        head reads. Attention is causal: a token attends to itself and to the tokens before it,
        within the window.
        """
        total_B = self.per_token * lengths_B.double()
        total_B += self.per_scored_token * num_scored_B.double()
        for flops, window in self.per_pair:
            reach = lengths_B
            if window:
                reach = lengths_B.clamp(max=window)
            # Each of the first `reach` tokens attends to one more token than the one before it, and
            # each of the others attends to `reach` tokens.
            first_pairs_B = reach * (reach + 1) // 2
            other_pairs_B = (lengths_B - reach) * reach
            num_pairs_B = first_pairs_B + other_pairs_B
            total_B += flops * num_pairs_B.double()
        return total_B


def _flops_per_pair(text_config: PretrainedConfig) -> tuple[tuple[float, int | None], ...]:
    """Returns `ModelCost.per_pair` of a language model."""
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if not kinds:
        kinds = ["sliding_attention"] * text_config.num_hidden_layers
    per_pair: Counter[int | None] = Counter()
    for heads, kind in zip(attention_heads(text_config), kinds, strict=True):
        window_of_layer = None
        if kind == "sliding_attention":
            window_of_layer = window
        # A pair is two products of vectors: query with key, and weight with value.
        per_pair[window_of_layer] += 4 * heads.number * heads.size
    return tuple((flops, window) for window, flops in per_pair.items())
