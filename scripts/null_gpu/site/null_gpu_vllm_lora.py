"""vLLM's Triton kernels for adapters, on the memory of the null GPU.

Triton's interpreter has no bfloat16: it would multiply the bits of such matrices as integers.
"""

from collections.abc import Iterator

import torch
from null_gpu_kernels import on_host, register

_library = torch.library.Library("vllm", "IMPL")


def _rows_of_adapters(adapter_of_token: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each adapter with the tokens that it is for; -1 is none."""
    of_token = on_host(adapter_of_token)
    for adapter in of_token.unique().tolist():
        if adapter >= 0:
            yield adapter, of_token == adapter


def _matrix(weights: torch.Tensor, adapter: int) -> torch.Tensor:
    return on_host(weights)[adapter].reshape(weights.size(-2), weights.size(-1)).float()


def lora_shrink(
    inputs: torch.Tensor,
    weights_a: list[torch.Tensor],
    out: torch.Tensor,
    adapter_of_token: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    starts: torch.Tensor,
    adapters: torch.Tensor,
    has_none: torch.Tensor,
    num_active: torch.Tensor,
    scaling: float,
) -> None:
    """out[slice, token] = scaling A[slice] x[token]."""
    if has_none.item():
        return
    on_host(out).zero_()
    for adapter, rows in _rows_of_adapters(adapter_of_token):
        for index, weights in enumerate(weights_a):
            product = on_host(inputs)[rows].float() @ _matrix(weights, adapter).T
            on_host(out)[index, rows] = (scaling * product).to(out.dtype)


def lora_expand(
    inputs: torch.Tensor,
    weights_b: list[torch.Tensor],
    out: torch.Tensor,
    adapter_of_token: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    starts: torch.Tensor,
    adapters: torch.Tensor,
    has_none: torch.Tensor,
    num_active: torch.Tensor,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """out[token, columns of the slice] = B[slice] x[slice, token], rounded, added to what is there
    if so asked."""
    if has_none.item():
        return
    for adapter, rows in _rows_of_adapters(adapter_of_token):
        column = offset_start
        for index, weights in enumerate(weights_b):
            columns = slice(column, column + weights.size(-2))
            column = columns.stop
            factors = on_host(inputs)[index, rows].to(weights.dtype).float()
            product = (factors @ _matrix(weights, adapter).T).to(weights.dtype)
            before = on_host(out)[rows, columns]
            on_host(out)[rows, columns] = before + product if add_inputs else product.to(out.dtype)


def install() -> None:
    for kernel in (lora_shrink, lora_expand):
        register(kernel.__name__, kernel, _library)
