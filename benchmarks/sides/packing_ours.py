from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.packing_data import LONGEST, PROMPT, VOCABULARY, columns
from verl_like.protocol import DataProto
from verl_like.protocol.padded import without_padding
from verl_like.workers.engine.micro_batch import MicroBatch
from verl_like.workers.models.attention import choose_attention
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.packing import Rows, pack

state: dict[str, Any] = {}


def write(path: str) -> dict[str, Any]:
    """Writes a Llama of 4.2 million parameters with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return {}


def load(path: str) -> dict[str, Any]:
    attention = choose_attention(None, "cpu", torch.float32)
    state["policy"] = PolicyModel(
        AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention)
    ).train()
    batch = {name: torch.from_numpy(column) for name, column in columns().items()}
    batch["responses"] = batch["input_ids"][:, PROMPT:]
    state["rows"] = Rows.of(without_padding(DataProto.from_dict(batch), pad_token_id=0))
    return {}


def step() -> dict[str, Any]:
    policy = state["policy"]
    policy.zero_grad()
    with stopwatch() as seconds:
        micro = MicroBatch(state["rows"], "cpu")
        packed = pack(micro.on_host)
        log_probs_BR = micro.of_rows(packed.of_tokens(policy(packed, 1.0)[0]))
        (-log_probs_BR.sum() / state["rows"].num_scored_B.sum()).backward()
    grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in policy.parameters()])
    return {
        "seconds": seconds[0],
        "log_probs": log_probs_BR.detach().numpy(),
        "grad_norm": grad_norm.item(),
    }


if __name__ == "__main__":
    serve(write, load, step)
