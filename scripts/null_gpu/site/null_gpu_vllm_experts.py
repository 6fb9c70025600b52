"""The CUDA kernels of vLLM that a mixture of experts needs, on the memory of the null GPU.

Triton's interpreter multiplies the bits of bfloat16 numbers, so the product of tokens with their
experts is answered too.

Legend: N tokens, k experts of a token.
"""

from types import ModuleType
from typing import Any

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
    if any(each is not None for each in scattered):
        raise NotImplementedError("The null GPU does not answer places that are scattered.")
    flat = on_host(ids).flatten()
    padding = flat.numel()
    ordered = on_host(sorted_ids).fill_(padding)
    of_blocks = on_host(expert_ids).fill_(-1)
    end = 0
    for expert in range(num_experts):
        own_expert = expert if expert_map is None else int(on_host(expert_map)[expert])
        if own_expert == -1:  # another process has it
            continue
        places = (flat == expert).nonzero().flatten()
        num_blocks = -(-len(places) // block_size)
        ordered[end : end + len(places)] = places
        first = end // block_size
        of_blocks[first : first + num_blocks] = own_expert
        end += num_blocks * block_size
    on_host(num_padded).fill_(end)


def moe_sum(
    values: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """The sum over the experts of each token, of (N, k, values). What other processes' experts
    would have is not initialised."""
    of_experts = on_host(values).float()
    if ids is not None and expert_map is not None:
        is_elsewhere = on_host(expert_map)[on_host(ids).long()] == -1
        of_experts = of_experts.masked_fill(is_elsewhere[..., None], 0.0)
    on_host(out).copy_(of_experts.sum(1))


def multiply(
    tokens: torch.Tensor,
    matrices: torch.Tensor,
    out: torch.Tensor,
    token_scale: torch.Tensor | None,
    matrix_scale: torch.Tensor | None,
    weights: torch.Tensor | None,
    sorted_ids: torch.Tensor | None,
    expert_ids: torch.Tensor,
    num_padded: torch.Tensor,
    is_weighted: bool,
    num_selected: int,
    config: dict[str, Any],
    *unused: Any,
    B_bias: torch.Tensor | None = None,
    **others: Any,
) -> None:
    """Multiplies each token by the matrices of its experts, and by its weights if they are asked
    for. Each block of `sorted_ids` has one expert."""
    if token_scale is not None or matrix_scale is not None:
        raise NotImplementedError("The null GPU answers experts that are not quantised.")
    rows = on_host(tokens)
    results = on_host(out).view(-1, out.size(-1))
    num_results = len(rows) * num_selected
    block_size = config["BLOCK_SIZE_M"]
    if sorted_ids is None:  # each block has one token
        blocks = [torch.tensor([number]) for number in range(num_results)]
    else:
        num_sorted = int(on_host(num_padded))
        blocks = list(on_host(sorted_ids)[:num_sorted].split(block_size))
    for block, expert in zip(blocks, on_host(expert_ids).tolist(), strict=False):
        places = block[block < num_results].long()
        if expert == -1:  # another process has it
            results[places] = 0
            continue
        matrix = on_host(matrices)[expert].float()
        product = rows[places // num_selected].float() @ matrix.T
        if B_bias is not None:
            product += on_host(B_bias)[expert].float()
        if is_weighted:
            assert weights is not None
            product *= on_host(weights).flatten()[places][:, None]
        results[places] = product.to(results.dtype)


def use_multiply(module: ModuleType) -> None:
    """Puts `multiply` into the place of what starts vLLM's Triton kernel."""
    module.invoke_fused_moe_triton_kernel = multiply


def install() -> None:
    for kernel in (topk_softmax, moe_align_block_size, moe_sum):
        register(kernel.__name__, kernel, _library)
