"""What a model's forward pass costs in floating-point operations, for balancing work and for
MFU."""

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

# Legend: B rows. One multiplication and one addition are two FLOPs; only matrix products count.


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one layer."""

    number: int
    key_value_number: int
    size: int


def attention_heads(text_config: PretrainedConfig) -> list[AttentionHeads]:
    """The heads of each layer of a language model, which differ between the layers of Gemma 4."""
    heads = []
    for layer in range(text_config.num_hidden_layers):
        config = text_config.per_layer_config[layer]
        number = config.num_attention_heads
        key_value_number = getattr(config, "num_key_value_heads", None) or number
        size = getattr(config, "head_dim", None) or config.hidden_size // number
        heads.append(AttentionHeads(number, key_value_number, size))
    return heads


@dataclass(frozen=True)
class ModelCost:
    """FLOPs of a causal language model; a training step costs three times its forward pass
    (recomputation aside)."""

    per_token: float
    """FLOPs of the decoder layers' matrices for one token; of a mixture of experts those that a
    token is routed to."""
    per_scored_token: float
    """FLOPs of the language-model head for one token; 0 where there is none."""
    per_pair: tuple[tuple[float, int | None], ...]
    """(FLOPs for one query-key pair, window) of layers with the same sliding window; None attends
    to all before."""

    @classmethod
    def of(cls, hf_config: PretrainedConfig, *, with_head: bool = True) -> "ModelCost":
        """Counts the matrices of the language model, with its head or without; it is built without
        memory for it."""
        hf_config = hf_config.get_text_config()
        # A configuration that came with code of its own was read with the permission to run that
        # code.
        own_code = type(hf_config).__module__.startswith("transformers_modules.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=own_code)
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        ends = {id(head.weight), id(embedding.weight)}
        active = getattr(hf_config, "num_experts_per_tok", 1)
        matrices = [
            parameter
            for parameter in model.parameters()
            if parameter.ndim > 1 and id(parameter) not in ends
        ]
        # The experts of a layer are stacked: (experts, out, in).
        used = (
            matrix.numel() * (active / len(matrix) if matrix.ndim == 3 else 1)
            for matrix in matrices
        )
        window = getattr(hf_config, "sliding_window", None)
        kinds = (
            getattr(hf_config, "layer_types", None)
            or ["sliding_attention"] * hf_config.num_hidden_layers
        )
        per_pair: Counter[int | None] = Counter()  # query with key, and weight with value
        for heads, kind in zip(attention_heads(hf_config), kinds, strict=True):
            per_pair[window if kind == "sliding_attention" else None] += (
                4 * heads.number * heads.size
            )
        per_scored_token = 2.0 * head.weight.numel() if with_head else 0.0
        return cls(
            2.0 * sum(used),
            per_scored_token,
            tuple((float(flops), w) for w, flops in per_pair.items()),
        )

    def forward(self, lengths_B: torch.Tensor, num_scored_B: torch.Tensor) -> torch.Tensor:
        """FLOPs of one forward pass over each row, (B,) float64, by its tokens and those that the
        head reads.

        Attention is causal: a token attends to itself and to those before, within the window.
        """
        total_B = (
            self.per_token * lengths_B.double() + self.per_scored_token * num_scored_B.double()
        )
        for flops, window in self.per_pair:
            reach = lengths_B.clamp(max=window) if window else lengths_B
            # Of the first `reach` tokens each attends to one more, of the others each to `reach`.
            num_pairs_B = reach * (reach + 1) // 2 + (lengths_B - reach) * reach
            total_B += flops * num_pairs_B.double()
        return total_B
