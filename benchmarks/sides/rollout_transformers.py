"""transformers' side of `rollout`: `generate` on one padded batch, as TRL's GRPO trainer generates
without vLLM."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.rollout_data import lengths, prompts

state: dict[str, Any] = {}


def start(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    state["model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    state["model"].generation_config = GenerationConfig()
    return {}


def _generate(seed: int, length: int, **settings: Any) -> torch.Tensor:
    ids = torch.tensor(prompts(seed))
    config = GenerationConfig(max_new_tokens=length, pad_token_id=0, eos_token_id=None, **settings)
    with torch.no_grad():
        output = state["model"].generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            disable_compile=True,
        )
    return output[:, ids.shape[1] :]


def generate(seed: int) -> dict[str, Any]:
    """The batch runs until its longest response ends; the tokens after the end of the others are of
    no use."""
    wanted = lengths(seed)
    with stopwatch() as seconds:
        responses = _generate(
            seed, max(wanted), do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
    assert responses.shape == (len(wanted), max(wanted))
    return {"seconds": seconds[0], "tokens": sum(wanted)}


def greedy(seed: int, length: int) -> dict[str, Any]:
    return {"responses": _generate(seed, length, do_sample=False).numpy()}


if __name__ == "__main__":
    serve(start, generate, greedy)
