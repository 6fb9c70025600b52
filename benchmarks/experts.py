"""Times transformers' ways of computing experts beside each other: forward and backward, on a CPU.

The ways take turns, so that both meet the same machine.
"""

import time
from statistics import median

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.harness import Report, sized

WAYS = ("eager", "grouped_mm")
"""eager is a loop over the experts."""
SHAPES = (
    # tokens, hidden size, size of an expert, experts, experts of a token
    (512, 64, 32, 32, 4),
    (512, 256, 128, 32, 4),
    (2048, 256, 128, 128, 8),
    (2048, 1024, 384, 32, 4),
)[: sized(4, 1)]
NUM_ROUNDS = sized(9, 1)


def block_of(hidden: int, size: int, experts: int, top_k: int) -> Qwen3MoeSparseMoeBlock:
    """Makes one layer's router and experts."""
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=size,
        num_experts=experts,
        num_experts_per_tok=top_k,
    )
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return block


def seconds_of(block: Qwen3MoeSparseMoeBlock, inputs: torch.Tensor, way: str) -> float:
    """Returns the seconds of a forward and a backward pass."""
    block.experts.config._experts_implementation = way
    block.zero_grad()
    started = time.perf_counter()
    block(inputs).square().sum().backward()
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    report = Report("experts", "A layer's experts, one thread: grouped_mm against a loop over them")
    for num_tokens, hidden, size, experts, top_k in SHAPES:
        block = block_of(hidden, size, experts, top_k)
        inputs = torch.randn(1, num_tokens, hidden)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            seconds_of(block, inputs, way)
        for _round in range(NUM_ROUNDS):
            for way in WAYS:
                taken = seconds_of(block, inputs, way)
                seconds[way].append(taken)
        shape = f"{num_tokens} tokens, hidden {hidden}, {top_k} of {experts} experts of {size}"
        ratio = median(seconds["eager"]) / median(seconds["grouped_mm"])
        for way in WAYS:
            in_ms = [1000 * each for each in seconds[way]]
            of_loop = {"loop_by_this": ratio} if way == "grouped_mm" else {}
            report.row(f"{shape}: {way}", "ms", in_ms, **of_loop)
    report.write()


if __name__ == "__main__":
    main()
