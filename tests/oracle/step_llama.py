"""A Llama in float64, written out: the model of the reference. Imports nothing from `verl_like`."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

Parameters = dict[str, torch.Tensor]


class Llama:
    """A Llama of a Hugging Face folder in float64."""

    def __init__(self, folder: str, overrides: dict[str, object]) -> None:
        self.config = json.loads(Path(folder, "config.json").read_text()) | overrides
        loaded = load_file(Path(folder, "model.safetensors"))
        self.parameters: Parameters = {n: w.double().requires_grad_() for n, w in loaded.items()}

    def norm(self, x_ND: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.parameters[name] * x_ND * scale

    def rotate(self, x_NHE: torch.Tensor) -> torch.Tensor:
        """Rotary positions (arXiv:2104.09864), the two halves of each head as real and imaginary
        parts."""
        half = x_NHE.size(-1) // 2
        base = self.config["rope_parameters"]["rope_theta"]
        frequency_E = base ** -(torch.arange(half, dtype=torch.float64) / half)
        angle_N1E = torch.arange(len(x_NHE), dtype=torch.float64)[:, None, None] * frequency_E
        real, imaginary = x_NHE[..., :half], x_NHE[..., half:]
        cos, sin = angle_N1E.cos(), angle_N1E.sin()
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)

    def hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        """(N, D) after the last norm."""
        config, weights, length = self.config, self.parameters, len(token_ids)
        heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        is_future_NN = torch.ones(length, length, dtype=torch.bool).triu(1)
        x_ND = weights["model.embed_tokens.weight"][token_ids]
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            h_ND = self.norm(x_ND, f"{layer}.input_layernorm.weight")
            query, key, value = (
                (h_ND @ weights[f"{layer}.self_attn.{part}_proj.weight"].T).unflatten(
                    -1, (-1, config["head_dim"])
                )
                for part in "qkv"
            )
            query, key = self.rotate(query), self.rotate(key)
            key, value = (
                part.repeat_interleave(heads // key_heads, dim=1) for part in (key, value)
            )
            scores_HNN = torch.einsum("nhe,mhe->hnm", query, key) / math.sqrt(config["head_dim"])
            attention_HNN = scores_HNN.masked_fill(is_future_NN, -math.inf).softmax(-1)
            mixed_ND = torch.einsum("hnm,mhe->nhe", attention_HNN, value).flatten(1)
            x_ND = x_ND + mixed_ND @ weights[f"{layer}.self_attn.o_proj.weight"].T
            h_ND = self.norm(x_ND, f"{layer}.post_attention_layernorm.weight")
            gate, up = (
                h_ND @ weights[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up")
            )
            x_ND = x_ND + (gate * gate.sigmoid() * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
        return self.norm(x_ND, "model.norm.weight")
