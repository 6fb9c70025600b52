from typing import Any

import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head, selective_log_softmax

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.packing_data import PROMPT, columns

state: dict[str, Any] = {}


def load(path: str, fused: bool) -> dict[str, Any]:
    state["model"] = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").train()
    state["fused"] = fused
    if fused:
        add_fused_lm_head(state["model"])
    state.update({name: torch.from_numpy(column) for name, column in columns().items()})
    return {}


def log_probs() -> torch.Tensor:
    """As TRL's GRPO trainer computes them: of the fused head, which 1.16 has, or of the logits, as
    before."""
    model = state["model"]
    input_ids = state["input_ids"]
    mask = state["attention_mask"]
    completion = mask[:, PROMPT:]
    if state["fused"]:
        labels = input_ids.masked_fill(mask == 0, -100)
        labels[:, :PROMPT] = -100
        outputs = model(input_ids=input_ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, PROMPT - 1 :] * completion
    logits_to_keep = completion.size(1)
    outputs = model(
        input_ids=input_ids, attention_mask=mask, logits_to_keep=logits_to_keep + 1, use_cache=False
    )
    return selective_log_softmax(outputs.logits[:, :-1], input_ids[:, PROMPT:]) * completion


def step() -> dict[str, Any]:
    model = state["model"]
    model.zero_grad()
    with stopwatch() as seconds:
        log_probs_BR = log_probs()
        (-log_probs_BR.sum() / state["attention_mask"][:, PROMPT:].sum()).backward()
    grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return {
        "seconds": seconds[0],
        "log_probs": log_probs_BR.detach().numpy(),
        "grad_norm": grad_norm.item(),
    }


if __name__ == "__main__":
    serve(load, step)
