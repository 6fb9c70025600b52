"""The CUDA kernels of vLLM that a mixture of experts needs besides its Triton kernel, on the memory
of the null GPU.

Legend: N tokens, k experts of a token.
"""

import torch
from null_gpu_kernels import on_host, register

_library = torch.library.Library("_moe_C", "IMPL")


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    *padding: torch.Tensor | None,
) -> None:
    """The k experts of each token and their shares of the softmax; `places` numbers the results,
    all first experts before all second ones."""
    shares = on_host(logits).float().softmax(-1)
    scores = shares if bias is None else shares + on_host(bias)
    num_tokens, num_selected = ids.shape
    selected = scores.topk(num_selected, dim=-1).indices
    found = shares.gather(-1, selected)
    if renormalize:
        found = found / found.sum(-1, keepdim=True)
    on_host(weights).copy_(found)
    on_host(ids).copy_(selected)
    numbers = torch.arange(num_selected)[None] * num_tokens + torch.arange(num_tokens)[:, None]
    on_host(places).copy_(numbers)


def moe_align_block_size(
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_padded: torch.Tensor,
    expert_map: torch.Tensor | None,
    *scattered: torch.Tensor | None,
) -> None:
    """Sorts the places of (N, k) by their experts, each of which begins a block. What is left of a
    block is padded with N * k."""
    if expert_map is not None or any(each is not None for each in scattered):
        raise NotImplementedError("The null GPU answers experts that one process has alone.")
    flat = on_host(ids).flatten()
    padding = flat.numel()
    ordered = on_host(sorted_ids).fill_(padding)
    of_blocks = on_host(expert_ids).fill_(-1)
    end = 0
    for expert in range(num_experts):
        places = (flat == expert).nonzero().flatten()
        num_blocks = -(-len(places) // block_size)
        ordered[end : end + len(places)] = places
        first = end // block_size
        of_blocks[first : first + num_blocks] = expert
        end += num_blocks * block_size
    on_host(num_padded).fill_(end)


def moe_sum(values: torch.Tensor, out: torch.Tensor, *unused: torch.Tensor | None) -> None:
    """The sum over the experts of each token, of (N, k, values)."""
    on_host(out).copy_(on_host(values).float().sum(1))


def install() -> None:
    for kernel in (topk_softmax, moe_align_block_size, moe_sum):
        register(kernel.__name__, kernel, _library)
